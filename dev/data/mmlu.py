#!/usr/bin/env python3
"""
MMLU (Hendrycks et al. 2021) as evaluation records in HellaSwag's form: mmlu_test.bin, 14,042 examples

    python dev/data/mmlu.py                                             downloads 160 MB and GPT-2's tokenizer
    python dev/data/mmlu.py --input data.tar --tokenizer tokenizer.json
    python dev/data/mmlu.py --input data/test/*.csv --tokenizer bytes

Inputs: the archive, of which data/test/*.csv is taken, or such files: question, four answers, the letter of the right one.
Context: "Question: ...\\n\\nAnswer:"; each answer follows with a space before it.
"""
from common import InputError, eval_main, read_csv, read_text, run, tar_members

URL = "https://people.eecs.berkeley.edu/~hendrycks/data.tar"


def read_tables(paths):
    """(rows, where) of each file"""
    for path in paths:
        if path.endswith((".tar", ".tar.gz")):
            for name, content in tar_members(path, ".csv"):
                if "/test/" in "/" + name:
                    where = f"{path}: {name}"
                    yield read_csv(content.decode("utf-8", "replace"), where), where
        else:
            yield read_csv(read_text(path), path), path


def read_examples(paths):
    for rows, where in read_tables(paths):
        for number, row in enumerate(rows, 1):
            if len(row) != 6 or row[5] not in ("A", "B", "C", "D"):
                raise InputError(f"{where}: row {number}: expected a question, four answers and one of A, B, C, D, "
                                 f"found {str(row)[:80]}")
            yield f"Question: {row[0]}\n\nAnswer:", [" " + answer for answer in row[1:5]], "ABCD".index(row[5])


def main(arguments):
    eval_main(arguments, __doc__, "the archive or its CSV files", URL, ("mmlu", "mmlu_test.bin"), read_examples)


if __name__ == "__main__":
    run("mmlu", main)
