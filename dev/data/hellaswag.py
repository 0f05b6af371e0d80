#!/usr/bin/env python3
"""
HellaSwag (Zellers et al. 2019) as evaluation records: hellaswag_val.bin, 10,042 examples

    python dev/data/hellaswag.py                                        downloads 12 MB and GPT-2's tokenizer
    python dev/data/hellaswag.py --input hellaswag_val.jsonl --tokenizer tokenizer.json

Each line of the input has "ctx", four "endings" and "label". Endings are encoded with a space before them. Give the
tokenizer of the model: records hold tokens below 65,535.
"""
from common import InputError, eval_main, read_json_lines, run, text_of

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"


def read_examples(paths):
    for path in paths:
        for record, where in read_json_lines(path):
            endings, label = record.get("endings"), record.get("label")
            if not isinstance(endings, list) or [type(ending) for ending in endings] != [str] * 4:
                raise InputError(f'{where}: expected four texts as "endings"')
            if isinstance(label, str) and label.isdigit():  # the copy on Hugging Face has text there
                label = int(label)
            if type(label) is not int or not 0 <= label < 4:
                raise InputError(f'{where}: expected a "label" 0..3, found {label!r}')
            yield text_of(record, "ctx", where), [" " + ending for ending in endings], label


def main(arguments):
    eval_main(arguments, __doc__, "hellaswag_val.jsonl", URL, ("hellaswag", "hellaswag_val.bin"), read_examples)


if __name__ == "__main__":
    run("hellaswag", main)
