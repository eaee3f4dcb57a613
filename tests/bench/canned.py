"""Reports as a run on GPUs would leave them."""

from weft.bench.harness.report import Report, Row

MACHINE = {
    "gpu": "NVIDIA H200", "simulated": False, "driver": "580.1", "torch": "2.11.0", "cuda": "13.0", "triton": "3.6.0",
    "nccl": "2.28.9", "python": "3.12.3", "weft": "0.1.0", "revision": "abc",
}  # fmt: skip


def row(shape, provider, role, median=None, **more):
    label = more.pop("label", "x".join(map(str, shape)))
    fields = {"mode": "graph", "p10_us": median, "p90_us": median, "samples": 9} if median else {}
    return Row(shape=shape, label=label, provider=provider, role=role, median_us=median, **fields, **more)


def report(op, world_size, rows, **machine):
    return Report(
        op=op, world_size=world_size, dtype="bf16", machine={**MACHINE, **machine}, rows=rows, command="weft bench x",
        protocol={"timing": "events", "empty_us": 1.25}, date="2026-11-20T20:00:00+00:00",
    )  # fmt: skip


def all_reduce():
    small, large = (4096,), (67108864,)
    return report(
        "all-reduce",
        4,
        [
            row(small, "weft.auto", "weft", 5.0, label="4 KiB", chain_us=3.1),
            row(small, "weft.one_shot", "weft", 4.5, label="4 KiB"),
            row(small, "nccl", "other", 20.0, label="4 KiB", chain_us=18.25),
            row(small, "torch.one_shot", "other", reason="no such op", label="4 KiB"),
            row(large, "weft.auto", "weft", 300.0, label="64 MiB"),
            row(large, "weft.one_shot", "weft", reason="wrong answer: rank 1: 3 of 9 elements", label="64 MiB"),
            row(large, "nccl", "other", 290.0, label="64 MiB", eager_us=310.0),
            row(large, "torch.one_shot", "other", reason="no such op", label="64 MiB"),
        ],
    )


def ag_gemm():
    shape, tall = (4096, 12800, 5120), (8192, 12800, 5120)
    return report(
        "ag-gemm",
        4,
        [
            row(shape, "cublas", "ceiling", 750.0, label="qwen3-32b gate-up M=4096"),
            row(shape, "cublas+nccl", "other", 830.0, label="qwen3-32b gate-up M=4096"),
            row(shape, "weft.auto", "weft", 740.0, label="qwen3-32b gate-up M=4096", max_abs_error=0.01),
            row(tall, "cublas", "ceiling", 1500.0, label="qwen3-32b gate-up M=8192"),
            row(tall, "cublas+nccl", "other", 1700.0, label="qwen3-32b gate-up M=8192"),
            row(tall, "weft.auto", "weft", 1480.0, label="qwen3-32b gate-up M=8192"),
        ],
    )


def model():
    rows = []
    for shape, label, times in (
        ((1, 128, 1), "decode 1x128", (5000.0, 7000.0, 6000.0)),
        ((32, 128, 128), "prefill 32x128", (110000.0, 109000.0, None)),
    ):
        for provider, us in zip(("weft.auto", "torch.eager", "torch.compile"), times, strict=True):
            more = {"reason": "no compiler"} if us is None else {}
            parts = {"gemm": 0.7 * us, "gap": 0.3 * us} if us and provider == "weft.auto" else None
            role = "weft" if "weft" in provider else "other"
            rows.append(row(shape, provider, role, us, label=label, parts_us=parts, **more))
    made = report("model", 4, rows)
    made.subject = "qwen3-32b"
    return made
