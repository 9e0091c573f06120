"""Grades notebooks without trusting them; `grade.py` says what is kept out and what is not."""
