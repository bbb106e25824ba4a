# Words for what one types all day; CONTRIBUTING.md explains them. `make check FILE=packages/tq/src/rl_tq/base.py`.
.PHONY: setup core test check docs ci

setup:  ## install everything
	uv sync --group dev

core:  ## tests that start no process
	uv run --no-sync pytest -n 2 -m core

test:  ## core and process tests
	uv run --no-sync pytest -n 2 --dist loadfile

check:  ## format, lint and types; of one file's package with FILE=
	uv run --no-sync ruff format $(FILE)
	uv run --no-sync ruff check --fix $(FILE)
	$(if $(FILE),tools/types.sh $(FILE),uv run --no-sync pyright)

docs:  ## build the site
	uv run --group dev --group docs mkdocs build --strict

ci:  ## what CI runs
	bash .ci/run
