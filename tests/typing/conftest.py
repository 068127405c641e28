"""What lies here to be read by type checkers is not to be run."""

collect_ignore = ["right_lines.py", "wrong_lines.py"]
