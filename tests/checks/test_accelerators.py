"""What the vendors' tools print, and what is made of it. The texts have the shape of what the tools print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.checks.accelerators import cpu, cuda, npu, registry, xpu
from holdfast.checks.accelerators.base import Accelerator, DeviceProblem, tool_output
from holdfast.checks.stages import fault_of
from holdfast.core.faults.failures import Exited, Failure, Signalled
from holdfast.core.faults.fault_table import BUILT_IN, classify, with_accelerator
from holdfast.core.faults.fault_types import Blame

HEALTHY_GPUS = """\
0, 0, No, No, No, 16, 16
1, 0, No, No, No, 16, 16
"""
SICK_GPUS = """\
0, 0, No, No, No, 16, 16
1, 3, No, No, No, 16, 16
2, [N/A], [N/A], [N/A], [N/A], 16, 16
3, 0, Yes, No, No, 16, 16
4, 0, No, Yes, No, 16, 16
5, 0, No, No, No, 8, 16
Unable to determine the device handle for GPU6: 0000:C1:00.0: GPU is lost.
"""
KERNEL_LOG = """\
[ 1021.332211] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 1021.332299] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 2400.000001] NVRM: Xid (PCI:0000:5e:00): 13, pid=4211, name=python, Graphics Exception: Shader Program Header
[ 2401.000001] NVRM: Xid (PCI:0000:5e:00): 94, pid=4211, name=python, Contained: SM (0x1). RST: No, D-RST: No
[ 2500.000000] usb 1-1: new high-speed USB device number 2
"""
NPU_TABLE = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 23.0.rc3                 Version: 23.0.rc3                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B3               | OK            | 94.0        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3306 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Alarm         | 94.7        38                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          3306 / 65536         |
+===========================+===============+====================================================+
"""
XPU_HEALTH = """\
+------------------------------+-------------------------------------------------------------------+
| Device ID                    | 1                                                                 |
+------------------------------+-------------------------------------------------------------------+
| 1. GPU Core Temperature      | Status: Ok                                                        |
|                              | Description: All temperature sensors are healthy.                 |
| 3. GPU Memory                | Status: Critical                                                  |
+------------------------------+-------------------------------------------------------------------+
"""


def by_device(ailments: list[DeviceProblem]) -> dict[int, str]:
    return {ailment.device: ailment.fault for ailment in ailments}


def test_healthy_gpus_have_no_ailments() -> None:
    assert cuda.parse_counters(HEALTHY_GPUS) == []


def test_what_nvidia_smi_counts_is_reported_by_gpu() -> None:
    found = cuda.parse_counters(SICK_GPUS)
    memory = dict.fromkeys((1, 3, 4), "gpu-memory-error")
    assert by_device(found) == memory | {5: "gpu-link-error"}
    assert found[0].text == "3 uncorrectable memory errors"
    assert found[-1].text == "its PCIe link has 8 of 16 lanes"


def test_xids_of_hardware_are_reported_once_and_those_of_programs_are_not() -> None:
    found = cuda.parse_xids(KERNEL_LOG, 2_600.0)
    assert [(ailment.fault, ailment.text) for ailment in found] == [
        ("gpu-lost", "Xid 79 on 0000:3b:00: the GPU has fallen off the bus"),
        ("gpu-memory-error", "Xid 94 on 0000:5e:00: a contained memory error"),
    ]


def test_xids_of_long_ago_are_history_and_one_of_a_repair_is_no_fault() -> None:
    found = cuda.parse_xids(KERNEL_LOG, 1_100.0 + cuda.XIDS_AGE_MAX_S)
    assert [ailment.text for ailment in found] == ["Xid 94 on 0000:5e:00: a contained memory error"]
    assert cuda.parse_xids(KERNEL_LOG, 2_600.0 + cuda.XIDS_AGE_MAX_S) == []
    assert cuda.parse_xids(KERNEL_LOG.replace(": 94,", ": 63,"), 1_100.0 + cuda.XIDS_AGE_MAX_S) == []


def test_an_npu_whose_health_is_not_ok_is_reported() -> None:
    assert by_device(npu.parse_table(NPU_TABLE)) == {1: "npu-unhealthy"}


def test_what_xpu_smi_finds_is_reported_by_device() -> None:
    (found,) = xpu.parse_health(XPU_HEALTH)
    assert (found.device, found.text) == (1, "xpu-smi calls its gpu memory critical")


def test_memory_controllers_that_count_uncorrectable_errors_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("mc0", "0\n"), ("mc1", "2\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ue_count").write_text(count)
    monkeypatch.setattr(cpu, "ERROR_COUNTS", tmp_path)
    assert [ailment.text for ailment in cpu.Cpu().ailments()] == ["2 uncorrectable errors of memory controller mc1"]


@pytest.mark.parametrize("text", ["", "\x00\xff", "1,2", "a, b, c, d, e, f, g", "| 1 |\n" * 1_000])
def test_what_is_not_understood_says_nothing(text: str) -> None:
    assert not cuda.parse_counters(text) and not cuda.parse_xids(text, 1.0)
    assert not npu.parse_table(text) and not xpu.parse_health(text)


def test_a_tool_that_is_missing_fails_or_hangs_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.checks.accelerators.base.TOOL_TIMEOUT_S", 0.1)
    assert tool_output(["no-such-tool-of-any-vendor"]) is None
    assert tool_output(["false"]) is None
    assert tool_output(["sleep", "60"]) is None
    assert tool_output(["echo", "well"]) == "well\n"


# --- the tables of faults


@pytest.mark.parametrize("name", registry.BUILT_IN)
def test_every_table_is_sound(name: str) -> None:
    accelerator = registry.load(name)
    assert accelerator.name == name and accelerator.backend
    for rule in accelerator.faults:
        assert rule.fault and re.compile(rule.text)
        assert rule.code is not None or rule.signal or rule.exception or rule.text, "a row that fits everything"


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("cuda", "RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu-memory-error"),
        ("cuda", "AcceleratorError: CUDA error: unknown error", "gpu-driver-error"),
        ("cuda", "AcceleratorError: CUDA error: unspecified launch failure", "gpu-launch-failure"),
        ("cuda", "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus", "gpu-lost"),
        ("npu", "EI0002: notify wait timeout", "collective-timeout"),
        ("npu", "RuntimeError: HBM MULTI BIT ECC ERROR, error code is 507054", "npu-memory-error"),
        ("cpu", "mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5", "cpu-machine-check"),
        ("cuda", "ValueError: boom", "check-failed"),
    ],
)
def test_a_text_that_means_hardware_is_named(name: str, text: str, fault: str) -> None:
    assert fault_of(registry.load(name), text) == fault


@pytest.mark.parametrize(
    ("name", "text", "fault", "blame"),
    [
        ("cuda", "CUDA error: invalid device ordinal", "device-not-found", Blame.PROCESS),
        ("cuda", "CUDA error: no CUDA-capable device is detected", "device-not-found", Blame.PROCESS),
        ("cuda", "CUDA error: hardware stack error", "gpu-launch-failure", Blame.PROCESS),
        ("cuda", "CUDA error: device-side assert triggered", "device-assertion", Blame.USER_CODE),
        ("cuda", "CUDA error: peer access is already enabled", "script-error", Blame.USER_CODE),
        ("npu", "aclrtSetDevice failed, error code is 107001", "device-not-found", Blame.PROCESS),
        ("npu", "ACL stream synchronize failed, error code:507015", "gpu-launch-failure", Blame.PROCESS),
        ("npu", "the task timed out, error code is 107020", "script-error", Blame.USER_CODE),
        ("npu", "EI9999: link down", "link-down", Blame.NETWORK),
        ("npu", "process 15070540 is not known", "script-error", Blame.USER_CODE),
        ("xpu", "level_zero backend failed: 20 (UR_RESULT_ERROR_DEVICE_LOST)", "gpu-launch-failure", Blame.PROCESS),
        ("mps", "MPSGraph does not support tensor dims larger than INT_MAX", "script-error", Blame.USER_CODE),
    ],
)
def test_errors_of_scripts_and_kernels_do_not_count_against_the_node(
    name: str, text: str, fault: str, blame: Blame
) -> None:
    table = with_accelerator(BUILT_IN, registry.load(name).faults)
    failure = Failure(
        node_id="a",
        view=1,
        rank=0,
        local_rank=0,
        pid=1,
        end=Exited(1),
        failed_at=0.0,
        exception="RuntimeError",
        message=f"RuntimeError: {text}",
    )
    found = classify(failure, table)
    assert (found.name, found.blame) == (fault, blame)
    assert found.examine == (fault in ("device-not-found", "gpu-launch-failure", "link-down"))


def test_a_program_for_another_processor_is_no_broken_one() -> None:
    table = with_accelerator(BUILT_IN, registry.load("cpu").faults)
    end = Signalled(4, "SIGILL")
    failure = Failure(node_id="a", view=1, rank=0, local_rank=0, pid=1, end=end, failed_at=0.0)
    assert classify(failure, table).name == "crashed"


def test_the_exit_codes_of_gpus_are_in_the_table() -> None:
    codes = {rule.code: rule.fault for rule in registry.load("cuda").faults if rule.code is not None}
    assert codes == {
        14: "gpu-inforom-corrupted",
        128: "gpu-unknown-device",
        201: "gpu-driver-error",
        202: "gpu-residual-processes",
    }


def test_loading_a_plug_in_does_not_import_torch() -> None:
    import subprocess
    import sys

    program = (
        "import sys; from holdfast.checks.accelerators import registry;"
        " [registry.load(name).faults for name in registry.BUILT_IN]; registry.present();"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_processors_that_are_here_are_known_and_the_cpu_always_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cpu" in [kind.name for kind in registry.present()]
    monkeypatch.setattr(cuda, "has_device_files", lambda: True)
    monkeypatch.setattr(npu, "has_device_files", lambda: False)
    names = [kind.name for kind in registry.present()]
    assert names[0] == "cuda" and names[-1] == "cpu" and "npu" not in names

    def broken() -> bool:
        raise OSError("no /dev")

    monkeypatch.setattr(cuda, "has_device_files", broken)
    assert "cuda" not in [kind.name for kind in registry.present()], "and it is no reason not to start"


def test_every_built_in_is_an_accelerator() -> None:
    assert all(isinstance(registry.load(name), Accelerator) for name in registry.names())
