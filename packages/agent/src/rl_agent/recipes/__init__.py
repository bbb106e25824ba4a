"""Tasks of the recipes that train agents: a file each, named by `data.format` and `agent` of the recipe."""
