"""The training pipelines, one readable file each."""
