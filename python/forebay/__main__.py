"""`python -m forebay`: the `forebay` program."""

import os
import sys

from forebay._cli import program_path

program = program_path()
if program is None:
    sys.exit("forebay: the program is not where the package's programs are installed; install the wheel again")
os.execv(program, ["forebay", *sys.argv[1:]])
