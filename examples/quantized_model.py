"""A model with weights in 16, 8 and 4 bits: the bytes of its matrices, and whether the built-in model still adds.

python examples/quantized_model.py      on all GPUs, or on four virtual ranks if there are none

This model is so small that most of its rows in 4 bits are padded: they are stored in blocks of 128 columns.
"""

import weft

SUMS = {"12+34=": "46", "250+399=": "649", "99+1=": "100"}


def main(team):
    lines = []
    for quantization in (None, "fp8", "mxfp4", "int4"):
        mode = "reference" if team.is_simulated else "auto"
        engine = weft.Engine("adder", team, quantization=quantization, mode=mode, max_seq_len=64, warn=False)
        answers = engine.generate(list(SUMS), max_tokens=8, temperature=0)
        right = sum(answer.text.strip() == wanted for answer, wanted in zip(answers, SUMS.values(), strict=True))
        nbytes = sum(parameter.nbytes for parameter in engine.model.layers.parameters())
        lines.append(
            f"{quantization or '16 bits':8} {nbytes:7,} bytes in the layers of a rank, {right} of {len(SUMS)} sums"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(weft.launch(main)[0]))
