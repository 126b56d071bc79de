#!/usr/bin/env python3
"""`python recipes/run.py {fit,export,evaluate} --config recipes/RECIPE.yaml`; see --help of each."""

from gsq_module.cli import main

if __name__ == "__main__":
    main()
