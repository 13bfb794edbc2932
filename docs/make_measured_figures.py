"""Write benchmarks' figures into the pages, from the records in docs/measured: `python docs/make_measured_figures.py`.

    docs/measured/codec_cpu.json ──► docs/codecs.md    <!-- measured: codec_cpu -->
    (what the benchmark wrote,                         a table, its command, machine and day
     with command and machine)                         <!-- end -->

A record is what a benchmark wrote with `--output`; long lists of single times may be left out. Nothing between the two
marks is written by hand. Figures of studies are on the studies' own pages (`docs/take_study.py`).
"""

from __future__ import annotations

import json
import re
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
RECORDS = DOCS / "measured"
BLOCK = re.compile(r"(?<=<!-- measured: )(\w+)( -->\n)(.*?)(?=<!-- end -->)", re.DOTALL)

Record = dict[str, Any]


def record(name: str) -> Record:
    found: Record = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    rule = ["---", *(["--:" if right else "---"] * (len(head) - 1))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, *rows)).replace("\n", f"\n|{'|'.join(rule)}|\n", 1)


def paragraph(text: str) -> str:
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False) + "\n"


def source(*names: str) -> str:
    """Where a block comes from: commands, machine, day."""
    found = [record(name) for name in names]
    commands = ", ".join(
        f"`{one['command']}` ([record](measured/{name}.json))" for one, name in zip(found, names, strict=True)
    )
    days = sorted({one.get("begun", one.get("ended", ""))[:10] for one in found})
    machines = " and ".join(dict.fromkeys(one["machine"] for one in found))
    return paragraph(f"{commands}; {machines}; {', '.join(days)}.")


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} × ({min(ratios):.2f} to {max(ratios):.2f})"


def over(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [left / right for left, right in zip(one, other, strict=True)]


def signed(ratio: float) -> str:
    """+1.4 %, −0.5 %, 0.0 %."""
    text = f"{ratio:+.1%}".replace("%", " %").replace("-", "−")
    return text.replace("+0.0", "0.0").replace("−0.0", "0.0")


def percent(ratio: float, digits: int = 0) -> str:
    return f"{ratio:.{digits}%}".replace("%", " %")


def ms(seconds: float, digits: int = 0) -> str:
    return f"{seconds * 1e3:.{digits}f} ms"


def mib(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


# docs/codecs.md


def codec_cpu() -> str:
    found = record("codec_cpu")
    rows = {(one["codec"], one["way"]): one for one in found["dtypes"]["float32"]}

    def cell(codec: str, way: str) -> str:
        return f"{rows[codec, way]['gb_per_s']:.2f} ({rows[codec, way]['of_memcpy']:.2f})"

    def plain(codec: str) -> str:
        both = [rows.get((f"{codec} plain", way)) for way in ("encode", "decode")]
        return " / ".join(f"{one['gb_per_s']:.2f}" for one in both if one)

    codecs = ("block8", "block6", "block4", "hadamard8", "hadamard4")
    return (
        source("codec_cpu")
        + "\n"
        + paragraph(
            f"One core, float32, {found['mebibytes']} MiB: payload GB/s and, in brackets, the share of memcpy in the "
            f"same rounds (memcpy {rows['memcpy', '']['gb_per_s']:.1f} GB/s):"
        )
        + "\n"
        + table(
            ("codec", "encode", "decode", "plain torch, encode / decode"),
            [(f"`{one}`", cell(one, "encode"), cell(one, "decode"), plain(one)) for one in codecs],
        )
    )


def codec_cuda() -> str:
    found = record("codec_cuda")
    small = found["small"]

    def shares(codec: str, dtype: str) -> str:
        ways = found[dtype]["codecs"].get(codec)
        return ", ".join(percent(ways[way][0]["share_of_copy"]) for way in ("encode", "decode")) if ways else ""

    def times(codec: str) -> str:
        digits = 0 if "plain" in codec else 1
        return ", ".join(f"{small[codec][f'{way}_us']:.{digits}f} µs" for way in ("encode", "decode"))

    rows = [
        (f"`{one}`", shares(one, "bfloat16"), shares(one, "float32"), times(one))
        for one in ("block8", "block4", "hadamard8", "hadamard4")
    ]
    rows.append(("a copy", "100 %", "100 %", f"{small['copy']['copy_us']:.1f} µs"))
    rows += [(f"`{one}` in plain torch", "", "", times(f"{one} in plain torch")) for one in ("block4", "sort3+1")]
    rates = " and ".join(f"{found[dtype]['copy_tb_per_s']:.2f}" for dtype in ("bfloat16", "float32"))
    check = found["check"]
    return (
        source("codec_cuda")
        + "\n"
        + paragraph(
            "Bytes read and written a second, as a share of a device-to-device copy of 512 MiB in the same run "
            f"({rates} TB/s):"
        )
        + "\n"
        + table(("codec", "bfloat16: encode, decode", "float32: encode, decode", "[32, 128, 768] bfloat16"), rows)
        + "\n"
        + paragraph(
            f"Of {check['tried']} tensors {check['tried'] - len(check['wrong'])} had the bytes and values of a CPU's."
        )
    )


def codec_links() -> str:
    found = record("codec_links")

    def cell(codec: str, name: str, row: dict[str, Any]) -> str:
        one, without = row[name], row["none"]
        text = f"{ms(one['step_s'])}, {without['step_s'] / one['step_s']:.2f} ×"
        if codec != "auto":
            return text
        chosen = ["".join(way) for way in one["codec"]]
        left = "leaves the link alone" if set(chosen) == {"none"} else " / ".join(f"`{way}`" for way in chosen)
        return f"{text}: {left}, {sent(one)}"

    def sent(one: dict[str, Any]) -> str:
        return f"{sum(one['sent_bytes']) / 1e6:.2f} MB"

    first = next(iter(found["links"].values()))
    rows = [
        (
            f"{float(rate):g} Gb/s",
            ms(row["none"]["step_s"]),
            cell("bf16", "bf16", row),
            cell("hadamard4", "hadamard4/block8", row),
            cell("auto", "auto", row),
        )
        for rate, row in found["links"].items()
    ]
    head = (
        "link",
        f"none, {sent(first['none'])} a step",
        f"`bf16`, {sent(first['bf16'])}",
        f"`hadamard4` / `block8`, {sent(first['hadamard4/block8'])}",
        "`auto`",
    )
    assert all(one["equal"] for row in found["links"].values() for one in row.values())
    num_steps = len(first["none"]["steps_s"])
    return (
        source("codec_links")
        + "\n"
        + paragraph(f"Median of {num_steps} steps; speed-up over no codec on the same cable:")
        + "\n"
        + table(head, rows)
    )


# docs/where-the-time-goes.md


def rivals(row: dict[str, Any]) -> str:
    """Ours over stock torch's and the other pipelines', round by round."""
    others = {"stock": row["stock_speedups"], "stock cut by equal parameters": row.get("parameters_speedups")}
    others |= {name: row["peers"][name] for name in row["peers"]}
    found = [f"over {name} {spread(over(row['speedups'], other))}" for name, other in others.items() if other]
    return f"{row['mode']} {', '.join(found)}"


def of_ideal(row: dict[str, Any]) -> str:
    """How near to as many times as fast as there are workers."""
    return percent(statistics.median(row["speedups"]) / row["stages"])


def of_bound(row: dict[str, Any]) -> str:
    return percent(statistics.median(row["speedups"]) / row["bound"])


def pipeline_deit_small() -> str:
    inference, training = record("pipeline_deit_small")["rows"]
    (longer,) = record("pipeline_deit_small_stream")["rows"]
    peers = [name for name in ("torchgpipe",) if name in inference["peers"]]
    rows = [
        (
            "training, 1F1B" if one is training else f"inference, {one['samples'] // 2} micro-batches",
            f"{one['bound']:.2f}",
            spread(one["speedups"]),
            of_bound(one),
            of_ideal(one),
            spread(one["stock_speedups"]),
            *(spread(one["peers"][name]) if name in one["peers"] else "–" for name in peers),
            spread(one["ceilings"]),
        )
        for one in (inference, longer, training)
    ]
    head = ("", "bubble bound", "ours", "of the bound", "of 2 ×", "stock", *peers, "two serial runs at once")
    forwards = sum(one["forward"] for one in inference["compute"])
    serial = 2 * statistics.median(one["serial"] for one in inference["rounds"])
    waits = inference["compute"][1]["receive"]
    first, second = training["compute"]
    return (
        source("pipeline_deit_small", "pipeline_deit_small_stream")
        + "\n"
        + table(head, rows, right=True)
        + "\n"
        + paragraph(f"Ours, round by round: {rivals(inference)}; {rivals(longer)}; {rivals(training)}.")
        + "\n"
        + paragraph(
            f"In inference the forwards of both stages take {ms(forwards)} together (medians), where serial takes "
            f"{ms(serial)} for the same two samples, and the second stage waits {ms(waits, 2)} for a message. In "
            f"training the first stage's forward takes {ms(first['forward'])}, the second's {ms(second['forward'])}, "
            f"their backwards {ms(first['backward'])} and {ms(second['backward'])}; the second waits "
            f"{ms(second['receive'])} for a message."
        )
    )


def pipeline_small_blocks() -> str:
    found = record("pipeline_small_blocks")
    rows = [
        (
            f"{one['mode']}, {one['samples'] // 2} micro-batches",
            f"{one['bound']:.2f}",
            spread(one["speedups"]),
            of_bound(one),
            spread(one["stock_speedups"]),
            spread(over(one["speedups"], one["stock_speedups"])),
            spread(one["ceilings"]),
        )
        for one in found["rows"]
    ]
    head = ("", "bubble bound", "ours", "of the bound", "stock", "ours over stock", "two serial runs at once")
    return source("pipeline_small_blocks") + "\n" + table(head, rows, right=True)


def pipeline_others() -> str:
    every = {
        "pipeline_mobilenet_v2": "MobileNetV2, data parallel",
        "pipeline_bert_minilm": "MiniLM, pipeline",
        "pipeline_bert_minilm_tensor": "MiniLM, tensor parallel",
    }
    names = [name for name in every if (RECORDS / f"{name}.json").exists()]
    rows = [
        (
            f"{every[name]}, {one['mode']}",
            f"{one['bound']:.2f}",
            spread(one["speedups"]),
            of_bound(one),
            of_ideal(one),
            spread(one["ceilings"]),
        )
        for name in names
        for one in record(name)["rows"]
    ]
    head = ("two cores", "bound", "ours", "of the bound", "of the ideal 2 ×", "two serial runs at once")
    return source(*names) + "\n" + table(head, rows, right=True)


def pipeline_resnet_50() -> str:
    (row,) = record("pipeline_resnet_50")["rows"]
    titles = {"torchgpipe": "torchgpipe, same split", "prepare_pippy": "`prepare_pippy`, same split"}
    columns = {
        "ours": spread(row["speedups"]),
        "of 2 ×": of_ideal(row),
        "stock, same split": spread(row["stock_speedups"]),
        "stock, cut by equal parameters": spread(row["parameters_speedups"]),
        **{title: spread(row["peers"][name]) for name, title in titles.items() if name in row["peers"]},
        "two serial runs at once": spread(row["ceilings"]),
    }
    busy = " and ".join(percent(one) for one in row["busy"])
    return (
        source("pipeline_resnet_50")
        + "\n"
        + table(list(columns), [list(columns.values())])
        + "\n"
        + paragraph(f"Ours, round by round: {rivals(row)}. Our stages compute {busy} of the time.")
    )


def pipeline_sixteen() -> str:
    names = [f"pipeline_16_{mode}{cores}" for cores in ("", "_other_cores") for mode in ("inference", "training")]
    rows = []
    for one in (row for name in names for row in record(name)["rows"]):
        busy = [rounds["together"] / rounds["ours"] / one["bound"] for rounds in one["rounds"]]
        own = [1 - (total(each, COMPUTING) + each["schedule_idle_s"]) / each["step_s"] for each in one["parts"]]
        rows.append(
            (
                f"{one['mode']}, {one['stages']} stages",
                f"{one['bound']:.2f}",
                spread(one["speedups"]),
                spread(one["stock_speedups"]) if one["stock_speedups"] else "",
                spread(one["ceilings"]),
                of_bound(one),
                f"{percent(statistics.median(busy))} ({percent(min(busy))} to {percent(max(busy))})",
                percent(max(own), 1),
            )
        )
    head = (
        *("", "bubble bound", "ours", "stock", "as many serial runs at once", "of the bound"),
        *("of the bound, on cores that are all busy", "the engine's own, of a step"),
    )
    return source(*names) + "\n" + table(head, rows, right=True)


def gloo_threads() -> str:
    def cell(seconds: list[float]) -> str:
        return f"{ms(statistics.median(seconds), 2)} (mean {ms(statistics.mean(seconds), 2)})"

    rows = [
        (f"{row['kind']} of {amount(row['bytes'])}", cell(row["plain_s"]), cell(row["patient_s"]))
        for row in record("gloo_threads")["rows"]
    ]
    return source("gloo_threads") + "\n" + table(("", "threads as always", "patient threads"), rows, right=True)


def amount(num_bytes: int) -> str:
    for size, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes // size} {name}"
    return f"{num_bytes} bytes"


def pipeline_parts() -> str:
    """Where the steps of the pipelines above went."""
    every = {"pipeline_deit_small": "DeiT-S", "pipeline_bert_minilm": "MiniLM"}
    names = [name for name in every if all("parts" in row for row in record(name)["rows"])]
    rows = {f"{every[name]}, {row['mode']}": row for name in names for row in record(name)["rows"]}
    if not rows:
        return paragraph(
            "No record of these has the parts of steps; `python benchmarks/pipeline_speedup.py` adds them."
        )
    return (
        source(*names)
        + "\n"
        + table(*core_table(rows), right=True)
        + "\n"
        + paragraph("How much longer a step is than serial's time divided by the stages, in the mean of the stages:")
        + "\n"
        + table(*rest_table(rows), right=True)
    )


COMPUTING = ("forward", "backward", "weights", "recompute", "optimizer")
WAITING = ("receive", "until_sent", "at_the_end", "sums")


def core_table(rows: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Each worker's step in shares of it, then what its threads took of its core."""
    workers = [
        (f"{title}, stage {stage}", parts, threads)
        for title, row in rows.items()
        for stage, (parts, threads) in enumerate(zip(row["parts"], row["threads"], strict=True))
    ]

    def share(*names: str) -> list[str]:
        return [percent(total(parts, names) / parts["step_s"], 1) for _, parts, _ in workers]

    def beside(name: str) -> list[str]:
        """Of a step's time, or how often in it."""
        if not name.endswith("_s"):
            return [f"{threads[name]:.0f}" if threads else "" for _, _, threads in workers]
        return [percent(threads[name] / parts["step_s"], 1) if threads else "" for _, parts, threads in workers]

    lines = {
        "a step": [ms(parts["step_s"]) for _, parts, _ in workers],
        "computing": share(*COMPUTING),
        "waiting for messages": share("receive"),
        "done, waiting for the other stage": share("at_the_end"),
        "waiting until messages have left": share("until_sent"),
        "handing messages over": share("send"),
        "Python between actions": share("between"),
        "*beside it:* Gloo's threads": beside("gloo_cpu_s"),
        "other threads": beside("others_cpu_s"),
        "ready to compute, but another had the core": beside("main_ready_s"),
        "times that the core was taken away": beside("main_put_off"),
        "pages asked of the kernel": beside("page_faults"),
    }
    return ["", *(title for title, _, _ in workers)], [[name, *cells] for name, cells in lines.items()]


def rest_table(rows: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """What makes a step longer than ideal: the columns after the first two add up to the second."""
    lines = []
    for title, row in rows.items():
        ideal_s = statistics.mean(one["serial"] for one in row["rounds"]) * row["samples"] / row["stages"]
        waits = [(total(parts, WAITING), parts["schedule_idle_s"]) for parts in row["parts"]]
        made = statistics.mean(min(waiting, idle) for waiting, idle in waits)
        means = {
            name: statistics.mean(parts[f"{name}_s"] for parts in row["parts"]) for name in ("step", "send", "between")
        }
        computing = statistics.mean(total(parts, COMPUTING) for parts in row["parts"])
        rest = {
            "longer": means["step"] - ideal_s,
            "computing longer than serial": computing - ideal_s,
            "waiting that the schedule makes": made,
            "other waiting": statistics.mean(waiting for waiting, _ in waits) - made,
            "handing over": means["send"],
            "Python": means["between"],
        }
        lines.append([title, *(signed(seconds / ideal_s) for seconds in rest.values())])
    return ["", *rest], lines


def total(parts: dict[str, float], names: Sequence[str]) -> float:
    return sum(parts[f"{name}_s"] for name in names)


# docs/fabric.md


def fabric_loss() -> str:
    """One lab run beside another whose routes have a lower retransmission timeout."""
    found, lower = record("fabric_loss"), record("fabric_loss_rto")
    words = {"retransmission-timeout": "timeouts", "host": "this host"}
    rows = []
    for one, other in zip([*found["layers"], found["total"]], [*lower["layers"], lower["total"]], strict=True):
        is_layer = "name" in one
        rows.append(
            (
                one["name"] if is_layer else "whole trial",
                f"{one['bytes'] if is_layer else sum(layer['bytes'] for layer in found['layers'])}",
                *(short(one[key]) for key in ("p50_s", "p90_s", "p95_s", "p99_s", "max_s", "jitter_s")),
                percent(one["share_of_ideal"]) if is_layer else "",
                short(one["floor_s"]) if is_layer else "",
                ", ".join(words.get(mode["kind"], mode["kind"]) for mode in one["modes"]) if is_layer else "",
                short(other["p99_s"]),
            )
        )
    head = ("layer", "bytes", "p50", "p90", "p95", "p99", "max", "jitter", "ideal", "floor", "looks like", "p99 there")
    sentence = found["verdict"]["sentence"]
    return (
        source("fabric_loss", "fabric_loss_rto")
        + "\n"
        + table(head, rows, right=True)
        + "\n"
        + paragraph(f"{found['trials']} trials; verdict: {sentence}. The last column is the second run's.")
    )


def short(seconds: float) -> str:
    """Three digits: 924 µs, 3.94 ms, 219 ms."""
    value, unit = (seconds * 1e6, "µs") if seconds < 1e-3 else (seconds * 1e3, "ms")
    return f"{value:.{max(0, 2 - len(str(int(value))) + 1)}f} {unit}"


def fabric_numbers() -> str:
    found, blamed = record("fabric_numbers"), record("fabric_blame")["networks"]
    rate, small, many, kill = (found[name] for name in ("rate", "small", "many", "kill"))
    sizes = ("8", "2600", "33024")
    ours = ", ".join(f"{ms(small['sockets, ring'][size], 2)} for {size} bytes" for size in sizes)
    gloo = ", ".join(ms(small["gloo"][size], 1) for size in sizes)
    right = sum(one["right"] for one in blamed)
    rows = [
        (
            "ring all-reduce of 64 MiB, lab hosts at 1 Gbit/s (`rate`)",
            ms(rate["sockets"]["median_s"]),
            f"{ms(rate['with_headers_s'])} on the wire with headers, {ms(rate['ideal_s'])} without; Gloo "
            f"{ms(rate['gloo']['median_s'])}",
        ),
        ("small messages on loopback, median (`small`)", ours, f"Gloo {gloo}"),
        (
            "10,000 trials × 4 layers of mlp-mnist on loopback, with figure and JSON (`many`)",
            f"{many['wall_s']:.0f} s",
            f"{many['trials_s']:.0f} s of it are the trials",
        ),
        (
            "an agent that is killed, or stopped (`kill`): until the others had stopped",
            f"{kill['SIGKILL']['stopped_s']:.2f} s, {kill['SIGSTOP']['stopped_s']:.1f} s",
            "",
        ),
        (
            "right host and cause in seeded labs (`fabric_blame.py`): slow link, lossy link, late host, nothing",
            f"{right} of {len(blamed)}",
            "",
        ),
    ]
    return source("fabric_numbers", "fabric_blame") + "\n" + table(("what", "measured", "beside"), rows)


# docs/forecast.md


def forecast_accuracy() -> str:
    return _accuracy_rows("forecast_accuracy")


def forecast_accuracy_more() -> str:
    return _accuracy_rows("forecast_accuracy_more")


def _accuracy_rows(name: str) -> str:
    found = record(name)
    rows = [
        (
            one["plan"],
            ms(one["forecast_s"]),
            ms(one["measured_s"]),
            signed(one["forecast_s"] / one["measured_s"] - 1),
            signed(one["forecast_unpaired_s"] / one["measured_s"] - 1),
            signed(one["forecast_memory_bytes"] / one["measured_memory_bytes"] - 1),
        )
        for one in found["plans"]
    ]
    return (
        source(name)
        + "\n"
        + table(("plan", "forecast", "measured", "paired error", "unpaired", "memory"), rows, right=True)
        + "\n"
        + _errors(found)
    )


def forecast_accuracy_unsteady() -> str:
    return source("forecast_accuracy_unsteady") + "\n" + _errors(record("forecast_accuracy_unsteady"))


def _errors(found: dict[str, Any]) -> str:
    wander = [max(one["unpaired_s"]) / min(one["unpaired_s"]) - 1 for one in found["plans"]]
    assert all(one["equal"] for one in found["plans"])
    return paragraph(
        f"**Mean error {percent(found['mean_error'], 1)}, worst {percent(found['worst_error'], 1)}** of "
        f"{len(found['plans'])} plans (by medians {percent(found['mean_error_of_medians'], 1)} and "
        f"{percent(found['worst_error_of_medians'], 1)}); unpaired {percent(found['mean_error_unpaired'], 1)} and "
        f"{percent(found['worst_error_unpaired'], 1)}. Unpaired forecasts of one plan differ by "
        f"{percent(min(wander))} to {percent(max(wander))} from turn to turn. Memory is that of the fullest worker, by "
        "what it counts of its own tensors."
    )


def forecast_memory_cuda() -> str:
    return _memory_rows("forecast_memory_cuda")


def forecast_memory_cuda_again() -> str:
    return _memory_rows("forecast_memory_cuda_again")


def _memory_rows(name: str) -> str:
    found = record(name)
    rows = [
        (
            one["plan"],
            mib(one["forecast_memory_bytes"]),
            mib(one["measured_memory_bytes"]),
            signed(one["forecast_memory_bytes"] / one["measured_memory_bytes"] - 1),
        )
        for one in found["plans"]
        if one["equal"]
    ]
    head = ("plan", "forecast", "measured", "error")
    return source(name) + "\n" + table(head, rows, right=True)


def forecast_speed() -> str:
    rows = [(one["what"], f"{one['seconds']:.2g} s") for one in record("forecast_speed")["rows"]]
    return source("forecast_speed") + "\n" + table(("what is computed", "median"), rows, right=True)


# docs/trace.md, docs/report.md, docs/watch.md


def trace_overhead() -> str:
    meshes = {"pipeline": "pipeline=2", "data": "data=2", "tensor": "tensor=2", "serial": "serial"}
    rows = []
    for name, mesh in meshes.items():
        one = max(record(f"trace_overhead_{name}")["workers"], key=lambda worker: worker["events"])
        rows.append(
            (
                mesh,
                f"{one['events']}",
                ms(one["without_s"], 1),
                f"{one['event_s'] * 1e6:.1f} µs",
                percent(one["events"] * one["event_s"] / one["without_s"], 2),
                signed(one["overhead"]),
                signed(one["by_chance"]),
            )
        )
    head = ("`digits-vit`", "events a step and worker", "step", "an event", "of the step", "measured", "by chance")
    return source(*(f"trace_overhead_{name}" for name in meshes)) + "\n" + table(head, rows)


def report_size() -> str:
    found = record("report_size")
    text = (
        f"{found['events']} events: the page is built in {found['total_s']:.2f} s and has {found['bytes'] / 1e6:.2f} "
        f"MB; a browser opens it in {found['open_s']:.2f} s, and a frame takes {found['zoom_median_ms']:.1f} ms when "
        f"zooming and {found['scroll_median_ms']:.1f} ms when scrolling (medians)."
    )
    return source("report_size") + "\n" + paragraph(text)


def live_page() -> str:
    found = record("live_page")
    one = found["rows"][0]
    text = (
        f"With {found['workers']} workers that each add {found['updates_per_s']:g} lines a second the server takes "
        f"{percent(one['server'])} of one core, and its viewer is {ms(one['behind_s'])} behind. The browser is not in "
        "that."
    )
    return source("live_page") + "\n" + paragraph(text)


BLOCKS: dict[str, Callable[[], str]] = {
    one.__name__: one
    for one in (
        codec_cpu,
        codec_cuda,
        codec_links,
        pipeline_deit_small,
        pipeline_small_blocks,
        pipeline_others,
        pipeline_resnet_50,
        pipeline_sixteen,
        gloo_threads,
        pipeline_parts,
        fabric_loss,
        fabric_numbers,
        forecast_accuracy,
        forecast_accuracy_more,
        forecast_accuracy_unsteady,
        forecast_memory_cuda,
        forecast_memory_cuda_again,
        forecast_speed,
        trace_overhead,
        report_size,
        live_page,
    )
}


def block(name: str) -> str:
    """What stands between two marks; where a machine that it needs was not at hand, that."""
    try:
        return BLOCKS[name]()
    except FileNotFoundError:
        return f"No record is kept; `python benchmarks/{name}.py --output docs/measured/{name}.json` makes one.\n"


def filled(text: str) -> str:
    """A page's text with its blocks made anew."""
    return BLOCK.sub(lambda match: f"{match[1]}{match[2]}\n{block(match[1])}\n", text)


def pages() -> list[Path]:
    """Pages with such blocks."""
    return sorted(page for page in DOCS.rglob("*.md") if "<!-- measured: " in page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
