"""Prints the shell block of a README that holds a word; there must be exactly one."""

import re
import sys

path, word = sys.argv[1:]
with open(path, encoding="utf-8") as file:
    blocks = re.findall(r"^```bash\n(.*?)^```$", file.read(), re.MULTILINE | re.DOTALL)
found = [block for block in blocks if word in block]
if len(found) != 1:
    sys.exit(f"{path}: {len(found)} shell blocks with {word!r}, expected 1")
print(found[0], end="")
