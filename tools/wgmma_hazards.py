#!/usr/bin/env python3
"""Registers that tensor cores still read must not be written: wgmma takes operands from registers while the warp goes
on, and nothing but the compiler's good will keeps other instructions from writing them before the wait
(src/cuda/prefill_wgmma.cuh).

    cuobjdump -xelf all prefill_e2m1.cu.o && nvdisasm -c *.cubin | tools/wgmma_hazards.py
    ... prefill_attention_wide.cu.o ...                          | tools/wgmma_hazards.py --full-waits 1

Reads each kernel's innermost loops around HGMMA instructions, each twice in a row, and follows which groups are under
way. Exit status 1: a hazard was found, or a loop waits for every group more often than is meant (serialised)."""
import argparse
import re
import sys

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+\s+)?([A-Zx0-9_.]+)\s*(.*?)\s*;")
WITHOUT_RESULT = ("ST", "SYNCS.ARRIVE", "RED", "UBLKCP", "BAR", "BRA")


def registers(token, count):
    match = re.match(r"R(\d+)", token)
    return set(range(int(match.group(1)), int(match.group(1)) + count)) if match else set()


def hazards(body):
    """Instructions of a loop that write what a group under way reads or adds to; and how many HGMMA it has."""
    groups, current, found, n_products = [], set(), [], 0
    for line in body * 2:
        match = INSTRUCTION.search(line)
        if not match:
            continue
        name, operands = match.group(1), [word.strip() for word in match.group(2).split(",")]
        if name.startswith("HGMMA"):
            n_products += 1
            columns = int(re.search(r"64x(\d+)x16", name).group(1))
            current |= registers(operands[1], 4) | registers(operands[0], columns // 2)
            if "gsb0" in operands:
                groups.append(current)
                current = set()
        elif name.startswith("WARPGROUP.DEPBAR"):
            pending = int(operands[-1], 16)
            groups = groups[len(groups) - pending:] if pending else []
        elif operands and not name.startswith(WITHOUT_RESULT):
            count = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
            if registers(operands[0], count) & current.union(*groups):
                found.append(line.strip())
    return found, n_products // 2


def loops_of(lines):
    """(begin, end) of each innermost loop that has HGMMA."""
    labels = {m.group(1): i for i, line in enumerate(lines) if (m := re.match(r"\s*(\.L_x_\d+):", line))}
    products = [i for i, line in enumerate(lines) if "HGMMA" in line]
    jumps = [(labels[m.group(1)], i) for i, line in enumerate(lines)
             if (m := re.search(r"BRA.*`\((\.L_x_\d+)\)", line)) and labels[m.group(1)] < i]
    # The shortest first. What overlaps one of them is a loop around it, or a wait that is repeated out of line.
    found, covered = [], set()
    for begin, end in sorted(jumps, key=lambda loop: loop[1] - loop[0]):
        inside = {i for i in products if begin < i < end}
        if inside and not inside & covered:
            found.append((begin, end))
            covered |= inside
    return sorted(found)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--full-waits", type=int, default=0, help="so many waits for every group in a loop are meant")
    full_waits = parser.parse_args().full_waits
    failed = False
    for text in re.split(r"\n\.text\.", sys.stdin.read())[1:]:
        lines = text.split("\n")
        if not any("HGMMA" in line for line in lines):
            continue
        name, loops = lines[0].split(":")[0], loops_of(lines)
        if not loops:
            print(name, "has no loop around its products")
            failed = True
        for begin, end in loops:
            found, n_products = hazards(lines[begin:end + 1])
            serial = sum("DEPBAR.LE gsb0, 0x0" in line for line in lines[begin:end])
            print(f"{name}: {n_products} products, {len(found)} hazards, {serial} full waits")
            for line in found:
                print("   ", line)
            failed |= bool(found) or serial > full_waits
    return failed


if __name__ == "__main__":
    sys.exit(main())
