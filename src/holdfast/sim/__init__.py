"""`holdfast sim`: the production core, driven by simulated machines.

Every decision in a simulation (who is evicted, which rung of the ladder, who takes over, when to grow) is made by the
functions of core/ that a master calls. What is simulated is what a master hears of: machines fail and are repaired, and
each phase of a recovery takes its time.

    scenario.py             what is simulated: machines, faults, strategy, durations
    outages.py              faults from a trace or a table
    fault_models.py         faults from a rate: regular, Poisson, Weibull; bursts, lemons, repairs
    phase_times.py          how long each phase takes: stated, or learned from a job's journal
    core_driver.py          the contract of core/transact.py with simulated time
    simulated_fleet.py      the machines, and what their agents report
    machine_histories.py    what is known of each machine, for the reputation that it joins with
    time_ledger.py          where the machines' time went
    simulation.py           the event loop of one run
    parallel_runs.py        many runs at once, in processes
    answers.py              questions, each a set of scenarios and what follows from their runs
    charts.py               pictures of the answers, as SVG or HTML
"""
