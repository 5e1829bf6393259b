"""`holdfast sim`, and the page that explains it."""

from __future__ import annotations

import json
import re
import shlex
import time
from pathlib import Path

import pytest

from holdfast.cli.main import main
from support.scenario import JobOnDisk

PAGE = Path(__file__).parents[2] / "docs/simulator.md"
SMALL = ("sim", "--nodes", "6", "--days", "2", "--seeds", "1", "--rate", "100/1000/day", "--repair", "2h")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    return said.out


def test_the_page_s_commands_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with --from-journal find a job with an incident."""
    JobOnDisk(tmp_path, "trained", start=time.time()).join("a").start("a").restart_once().close()
    blocks = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    commands = [line for line in blocks.replace("\\\n", " ").splitlines() if line]
    assert (
        len(commands) >= 7 and "--from-journal" in blocks and all(line.startswith("holdfast sim ") for line in commands)
    )
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path))
    words = [shlex.split(line.replace("$(mktemp -d)", str(tmp_path)))[1:] for line in commands]
    shown = "".join(printed(capsys, *each, "--processes", "1") for each in words)
    found = [float(text) for text in re.findall(r"^goodput: ([\d.]+)", shown, re.MULTILINE)]
    assert found[-2:] == [pytest.approx(80.6, abs=1.0), pytest.approx(43.6, abs=1.0)], "as the page says"
    assert "durations learned: " in shown


def test_json_has_the_figures_and_a_picture_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "fleet.svg"
    report = json.loads(printed(capsys, *SMALL, "-o", "json", "--ask", "strategy", "--plot", str(picture)))
    (answer,) = report["answers"]
    assert [one["label"] for one in answer["variants"]] == ["restart", "restart-elastic", "recover-fixed", "recover"]
    assert all(sum(one["accounts"].values()) == pytest.approx(1.0) for one in answer["variants"])
    assert report["gpus"] == 48 and report["speed"]["runs"] == 4
    assert picture.read_text().startswith("<svg ")


def test_a_table_of_faults_says_how_many_machines_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "faults.csv"
    table.write_text("node,start,end,kind\na,1,3,dies\nb,5,6,device\nc,20,21,leaves\n")
    text = printed(capsys, "sim", "--trace", str(table), "--seeds", "1", "--nodes-min", "1")
    assert "3 machines with 24 devices" in text and "in repair" in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nodes", "4"], "by one of --trace FILE, --rate 4/1000/day or --every 18m"),
        (["--rate", "4/1000/day"], "give the number of machines"),
        (["--nodes", "4", "--rate", "4"], "write 4/1000/day"),
        (["--nodes", "4", "--rate", "4/0/day"], "write 4/1000/day"),
        (["--nodes", "4", "--every", "18 parsecs"], "with its unit"),
        (["--nodes", "4", "--every", "0m"], "with its unit"),
        (["--nodes", "4", "--every", "1h", "--spares", "4"], "at most 3 can stand by"),
        (["--nodes", "4", "--every", "1h", "--repair", "3h:1h"], "the mean not below the median"),
        (["--nodes", "4", "--every", "1h", "--lemons", "0.05"], "write MACHINES:FAULTS"),
        (["--nodes", "4", "--every", "1h", "--kinds", "melts"], "there are dies, silent"),
        (["--nodes", "4", "--every", "1h", "--bursts", "1.5"], "give a share"),
        (["--nodes", "4", "--every", "1h", "--weibull", "0"], "give a shape"),
        (["--nodes", "4", "--every", "1h", "--regular", "--bursts", "0.2"], "give one of them"),
        (["--nodes", "4", "--every", "1h", "--days", "nan"], "give the number of days"),
        (["--nodes", "4", "--every", "1h", "--seeds", "0"], "--seeds 0"),
        (["--nodes", "4", "--every", "1h", "--plot", "fleet.png"], "written as .html or .svg"),
        (["--nodes", "4", "--every", "1h", "--nodes-min", "5"], "only 4 machines have ranks"),
        (["--trace", "/nowhere/trace.json"], "cannot be read"),
    ],
)
def test_nonsense_is_a_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", *words])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err
