"""What `tokenizer.py` stands on: readers of tokenizer files, splitting rules, spelling, and chat templates."""
