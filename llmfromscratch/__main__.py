"""`python -m llmfromscratch` is the command line."""

import sys

from llmfromscratch.cli import main

sys.exit(main())
