"""`run_dir/report/index.html`: what a run came to, with pictures, in one file that needs no network."""
