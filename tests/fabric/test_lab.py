from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stagewright.errors import UsageError
from stagewright.fabric.lab.kernel import _missing_capabilities, check_root, drop_filter
from stagewright.fabric.lab.namespaces import LabView, current_lab, remove_orphans
from stagewright.fabric.lab.network import LabNetwork, parse_loss
from stagewright.fabric.trials import TrialTable, row_type

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None,
    reason="a lab needs root and iproute2",
)
LAB = [sys.executable, "-m", "stagewright", "fabric", "lab"]


def remains(tag: str) -> list[str]:
    """What there is of a lab: namespaces and its folder."""
    named = Path("/run/netns")
    inside = list(named.iterdir()) if named.is_dir() else []
    return [one.name for one in [*inside, *Path(tempfile.gettempdir()).iterdir()] if one.name.startswith(tag)]


def running(tag: str) -> list[str]:
    """The processes that have a lab's name in their command."""
    return subprocess.run(["pgrep", "-f", tag], capture_output=True, encoding="utf-8", check=False).stdout.split()


def lab(*words: str, timeout: float = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAB, *words], capture_output=True, encoding="utf-8", timeout=timeout, check=False)


def test_what_is_typed_is_understood() -> None:
    network = LabNetwork.parse(
        hosts=4, rate="1gbit", delay="10ms", loss="1%", slow_links=["2:100mbit"], lossy_links=["3:5%"], rto_min="5ms"
    )
    assert network.rates == (125e6, 125e6, 12.5e6, 125e6)
    assert network.losses == (0.01, 0.01, 0.01, 0.05)
    assert network.losses_out == (0.0, 0.0, 0.0, 0.05)
    assert (network.delay_s, network.rto_min_s) == (0.01, 0.005)
    assert "rate 100 Mbit/s (host 2)" in network.describe()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"slow_links": ["4:1gbit"]}, "no host 4"),
        ({"slow_links": ["fast"]}, "names no host"),
        ({"loss": "lots"}, "is not a packet loss"),
        ({"loss": "100%"}, "use less than 100%"),
        ({"rate": "1"}, "is not a rate"),
        ({"delay": "11s"}, "too long"),
        ({"congestion": "cubic; reboot"}, "not a congestion control"),
    ],
)
def test_wrong_options_are_rejected(wrong: dict[str, object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LabNetwork.parse(hosts=4, **wrong)  # type: ignore[arg-type]


def test_losses() -> None:
    assert parse_loss("1%") == parse_loss("0.01") == 0.01
    # 1 % of 2³² is where the comparison is.
    assert drop_filter(0.01).split(",")[2] == "53 0 1 42949673"


def test_trials_in_which_the_switch_was_late_are_void(tmp_path: Path) -> None:
    rows = np.zeros((3, 1, 2), dtype=row_type(2))
    rows["start_s"] = np.array([10.0, 11.0, 12.0])[:, None, None]
    rows["duration_s"] = 0.5
    table = TrialTable(rows, np.zeros(3, dtype=np.bool_))
    path = tmp_path / "lateness"
    np.array([11.2, 0.03, 11.7, 0.01], dtype="<f8").tofile(path)
    view = LabView(hosts=(), network={}, lateness=str(path))
    assert view.late_trials(table).tolist() == [False, True, False]
    assert LabView(hosts=(), network={}, lateness=None).late_trials(table).tolist() == [False] * 3


def test_a_removed_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEWRIGHT_FABRIC_LAB", "/nowhere/lab.json")
    with pytest.raises(UsageError, match="is not a running lab"):
        current_lab()


def test_the_lab_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="a lab needs root to create network namespaces: run the command with sudo"):
        check_root()


@needs_root
def test_a_slow_link_is_found_and_nothing_stays(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "stagewright", "fabric", "run", "--sizes", "2600,200000", "--trials", "10"]
    done = lab(
        "--num-hosts",
        "3",
        "--rate",
        "1gbit",
        "--slow-link",
        "1:50mbit",
        "--",
        *run,
        "--no-floor",
        "--json",
        "--root",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["verified"] is True
    assert (result["verdict"]["kind"], result["verdict"]["rank"]) == ("slow-link", 1)
    assert result["network"]["rates"] == [125e6, 6.25e6, 125e6]
    # 4/3 · 200000 B at 50 Mbit/s take 43 ms; nothing can be quicker by much.
    assert result["layers"][1]["p50_s"] > 0.03
    assert "lab: rate by tbf" in done.stderr
    named = re.search(r"sw-lab-\d+-\d+", done.stderr)
    assert named is not None
    assert remains(named[0]) == []


@needs_root
@pytest.mark.slow
def test_losses_and_delays() -> None:
    """From inside: a ping over the user-space switch takes two delays; packets are lost as asked."""
    script = (
        "import contextlib, os, socket, time\n"
        "rank = int(os.environ['RANK'])\n"
        "there = (f'198.18.0.{2 - rank}', 9)\n"
        "with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:\n"
        "    with contextlib.suppress(OSError): s.setsockopt(socket.SOL_SOCKET, 33, 2**26)\n"  # SO_RCVBUFFORCE
        "    s.bind((f'198.18.0.{rank + 1}', 9))\n"
        "    s.settimeout(1.0 if rank == 0 else 60.0)\n"
        "    if rank == 0:\n"
        "        trips = []\n"
        "        while len(trips) < 5:\n"
        "            begin = time.monotonic(); s.sendto(b'x', there)\n"
        "            try: s.recv(9); trips.append(time.monotonic() - begin)\n"
        "            except TimeoutError: pass\n"
        "        print('trip', min(trips))\n"
        "        for _ in range(2000): s.sendto(b'y', there); time.sleep(0.0002)\n"
        "        for _ in range(50): s.sendto(b'z', there)\n"
        "    else:\n"
        "        got = 0\n"
        "        while (what := s.recv(9)) != b'z':\n"
        "            if what == b'x': s.sendto(b'x', there)\n"
        "            got += what == b'y'\n"
        "        print('got', got)\n"
    )
    done = lab(
        "--num-hosts", "2", "--delay", "20ms", "--lossy-link", "0:20%", "--each", "--", sys.executable, "-c", script
    )
    words = done.stdout.split()
    assert 0.04 <= float(words[words.index("trip") + 1]) < 0.5
    # 20 % are lost where they leave the host; 1600 of 2000 are left, give or take.
    assert 1450 < int(words[words.index("got") + 1]) < 1750


@needs_root
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_lab_that_is_killed_leaves_nothing(how: signal.Signals) -> None:
    process = subprocess.Popen(
        [*LAB, "--num-hosts", "2", "--delay", "1ms", "--", "sleep", "60"], stderr=subprocess.PIPE, encoding="utf-8"
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "congestion" in line:
            break
    tag = f"sw-lab-{process.pid}-"
    assert remains(tag)
    process.send_signal(how)
    process.wait(120)
    process.stderr.close()
    if how == signal.SIGKILL:
        remove_orphans()  # what the next lab does first, perhaps another test's in this very moment
    until_s = time.monotonic() + 60
    while (left := [*remains(tag), *running(tag)]) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert left == [], "no namespace, no folder; neither the switch nor the command goes on"


@needs_root
def test_the_commands_exit_code_is_the_labs() -> None:
    assert lab("--num-hosts", "2", "--", "false").returncode == 1
    done = lab("--num-hosts", "2", "--", "no-such-command")
    assert done.returncode == 2
    assert "command 'no-such-command' not found" in done.stderr


def test_networks_are_values() -> None:
    one = LabNetwork.parse(hosts=2)
    assert replace(one, mtu=9000).mtu == 9000
    assert one.address(1) == "198.18.0.2"


def test_root_of_a_container_lacks_capabilities(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nCapEff:\t00000000a80425fb\n")  # of a container that is not privileged
    assert _missing_capabilities(str(status)) == ["CAP_NET_ADMIN", "CAP_SYS_ADMIN"]
    status.write_text("CapEff:\t000001ffffffffff\n")
    assert _missing_capabilities(str(status)) == []
    assert _missing_capabilities(str(tmp_path / "none")) == []
