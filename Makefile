# Two commands matter: `make reproduce` makes every table and figure, `make test` proves the code.
# Both create .venv and install the pinned versions of requirements.lock first.
PYTHON ?= python3
VENV   ?= .venv
BIN     = $(VENV)/bin
PROFILE ?= small
# packages of the user's home must not shadow the pinned ones
export PYTHONNOUSERSITE = 1

.PHONY: install reproduce test lab notebooks clean clean-runs

install: $(VENV)/.installed

$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

reproduce: install
	$(BIN)/cirkit reproduce all --profile $(PROFILE)

test: install
	$(BIN)/nbdev_test --n_workers 2 --skip_folder_re '^(papers|[_.])'
	$(BIN)/pytest

lab: install
	$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 nbs

# Run the library notebooks in place, so that what is committed is what was executed.
notebooks: install
	for nb in $$(find nbs -name '*.ipynb' -not -path 'nbs/papers/*' -not -path '*/.*' | sort); do \
	  $(BIN)/jupyter nbconvert --log-level=ERROR --to notebook --execute --inplace $$nb || exit 1; done
	$(BIN)/nbdev_export && $(BIN)/nbdev_clean

clean:
	rm -rf $(VENV) build dist *.egg-info

# Hours of work may lie here: never part of `clean`.
clean-runs:
	rm -rf runs
