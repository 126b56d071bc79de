#!/usr/bin/env python3
"""`python recipes/run.py {fit,export,evaluate,plan,rehearse} --config RECIPE`; `doctor`; `verify FOLDER`; or --help."""

import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["doctor"]:
        # Before Lightning and transformers are imported: it is to help where they are broken.
        from gsq_module import doctor

        doctor.main(sys.argv[2:])
    else:
        from gsq_module import cli

        cli.main()
