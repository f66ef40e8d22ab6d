"""Writes what normal form C needs of the Unicode Character Database, as Python's unicodedata has it.

    python3 dev/reference/unicode_table.py > llmc/unicode_table.h && clang-format -i llmc/unicode_table.h
"""
import sys
import unicodedata


def parts(code):
    text = unicodedata.decomposition(chr(code))
    return [] if not text or text.startswith("<") else [int(part, 16) for part in text.split()]


def rows(values, width=6):
    for i in range(0, len(values), width):
        print("    " + " ".join("{" + ", ".join(f"0x{v:X}" for v in value) + "}," for value in values[i:i + width]))


def class_ranges():
    ranges = []
    for code in range(sys.maxunicode + 1):
        value = unicodedata.combining(chr(code))
        if value == 0:
            continue
        if ranges and ranges[-1][1] == code - 1 and ranges[-1][2] == value:
            ranges[-1][1] = code
        else:
            ranges.append([code, code, value])
    return ranges


def main():
    whole, split = [], []
    for code in range(sys.maxunicode + 1):
        found = parts(code)
        if not found:
            continue
        found += [0] * (2 - len(found))
        stays = unicodedata.normalize("NFC", chr(code)) == chr(code)
        (whole if stays else split).append([code] + found)
    whole.sort(key=lambda row: row[1:])
    print("// Made by dev/reference/unicode_table.py from the Unicode Character Database, version "
          f"{unicodedata.unidata_version}.")
    print("#ifndef LLMC_UNICODE_TABLE_H\n#define LLMC_UNICODE_TABLE_H\n\n#include <stdint.h> // uint32_t\n")
    print("// {whole, first, second}: canonical pairs that form C joins, by first and second.")
    print("static const uint32_t unicode_joined[][3] = {")
    rows(whole)
    print("};\n\n// {code, first, second}: code points that form C takes apart, by code; second 0: one for one.")
    print("static const uint32_t unicode_split[][3] = {")
    rows(split)
    print("};\n\n// {first, last, class}: canonical combining classes other than 0.")
    print("static const uint32_t unicode_classes[][3] = {")
    rows(class_ranges())
    print("};\n\nenum {")
    for name in ("joined", "split", "classes"):
        print(f"    UNICODE_{name.upper()} = sizeof unicode_{name} / sizeof *unicode_{name},")
    print("};\n\n#endif")


main()
