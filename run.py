"""The harness: `python run.py +experiment=tt_vs_tbe`; `python run.py --help` lists commands."""

import locale
import os
import sys

from experiments.cli import main

if __name__ == "__main__":
    if not sys.flags.utf8_mode and locale.getencoding().lower() != "utf-8":
        # All files of the harness are UTF-8, whatever the locale says; children inherit the mode.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    sys.exit(main(sys.argv[1:]))
