"""Blocks of docs/codecs.md."""

from __future__ import annotations

from typing import Any

from measured_figures.markdown import load_record, ms, paragraph, percent, source, table


def codec_cpu() -> str:
    record = load_record("codec_cpu")
    rows = {(row["codec"], row["way"]): row for row in record["dtypes"]["float32"]}

    def cell(codec: str, way: str) -> str:
        return f"{rows[codec, way]['gb_per_s']:.2f} ({rows[codec, way]['of_memcpy']:.2f})"

    def plain(codec: str) -> str:
        both = [rows.get((f"{codec} plain", way)) for way in ("encode", "decode")]
        return " / ".join(f"{row['gb_per_s']:.2f}" for row in both if row)

    codecs = ("block8", "block6", "block4", "hadamard8", "hadamard4")
    return (
        source("codec_cpu")
        + "\n"
        + paragraph(
            f"One core, float32, {record['mebibytes']} MiB: payload rate in GB/s and, in parentheses, relative to "
            f"memcpy in the same rounds (memcpy {rows['memcpy', '']['gb_per_s']:.1f} GB/s):"
        )
        + "\n"
        + table(
            ("codec", "encode", "decode", "plain torch, encode / decode"),
            [(f"`{codec}`", cell(codec, "encode"), cell(codec, "decode"), plain(codec)) for codec in codecs],
        )
    )


def codec_cuda() -> str:
    record = load_record("codec_cuda")
    small = record["small"]

    def shares(codec: str, dtype: str) -> str:
        ways = record[dtype]["codecs"].get(codec)
        return ", ".join(percent(ways[way][0]["share_of_copy"]) for way in ("encode", "decode")) if ways else ""

    def times(codec: str) -> str:
        digits = 0 if "plain" in codec else 1
        return ", ".join(f"{small[codec][f'{way}_us']:.{digits}f} µs" for way in ("encode", "decode"))

    rows = [
        (f"`{codec}`", shares(codec, "bfloat16"), shares(codec, "float32"), times(codec))
        for codec in ("block8", "block4", "hadamard8", "hadamard4")
    ]
    rows.append(("copy", "100 %", "100 %", f"{small['copy']['copy_us']:.1f} µs"))
    rows += [(f"`{codec}` in plain torch", "", "", times(f"{codec} in plain torch")) for codec in ("block4", "sort3+1")]
    rates = " and ".join(f"{record[dtype]['copy_tb_per_s']:.2f}" for dtype in ("bfloat16", "float32"))
    check = record["check"]
    return (
        source("codec_cuda")
        + "\n"
        + paragraph(
            "Bytes read and written per second, relative to a device-to-device copy of 512 MiB in the same run "
            f"({rates} TB/s):"
        )
        + "\n"
        + table(("codec", "bfloat16: encode, decode", "float32: encode, decode", "[32, 128, 768] bfloat16"), rows)
        + "\n"
        + paragraph(
            f"For {check['tried'] - len(check['wrong'])} of {check['tried']} tensors bytes and values were identical "
            "to those of the CPU codecs."
        )
    )


def codec_links() -> str:
    record = load_record("codec_links")

    def cell(codec: str, name: str, results: dict[str, Any]) -> str:
        result, baseline = results[name], results["none"]
        text = f"{ms(result['step_s'])}, {baseline['step_s'] / result['step_s']:.2f} ×"
        if codec != "auto":
            return text
        chosen = ["".join(direction) for direction in result["codec"]]
        codecs = "no codec" if set(chosen) == {"none"} else " / ".join(f"`{name}`" for name in chosen)
        return f"{text}: {codecs}, {sent(result)}"

    def sent(result: dict[str, Any]) -> str:
        return f"{sum(result['sent_bytes']) / 1e6:.2f} MB"

    first = next(iter(record["links"].values()))
    rows = [
        (
            f"{float(rate):g} Gb/s",
            ms(results["none"]["step_s"]),
            cell("bf16", "bf16", results),
            cell("hadamard4", "hadamard4/block8", results),
            cell("auto", "auto", results),
        )
        for rate, results in record["links"].items()
    ]
    head = (
        "link",
        f"none, {sent(first['none'])} per step",
        f"`bf16`, {sent(first['bf16'])}",
        f"`hadamard4` / `block8`, {sent(first['hadamard4/block8'])}",
        "`auto`",
    )
    assert all(result["equal"] for results in record["links"].values() for result in results.values())
    num_steps = len(first["none"]["steps_s"])
    return (
        source("codec_links")
        + "\n"
        + paragraph(f"Median of {num_steps} steps; speed-up over no codec on the same link:")
        + "\n"
        + table(head, rows)
    )
