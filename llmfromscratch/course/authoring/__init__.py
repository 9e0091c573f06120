"""From the chapters' sources to their notebooks; `python -m llmfromscratch.course.authoring.builder` runs it."""
