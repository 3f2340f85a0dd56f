# What people type; each line is also the plain command.

# list the recipes
default:
    @just --list

# make .venv from the lock, or bring it up to date
setup:
    bin/setup

# make .venv-sglang, where the tests of SGLang's own server find it
setup-sglang:
    bin/setup --sglang

# make .venv-sglang-upstream, all that pip brings with SGLang, 11 GB; bin/setup leaves it out
setup-sglang-upstream: setup
    .venv/bin/python -I bin/setup_venv.py .venv-sglang-upstream

# train the laptop demo; arguments go on to bin/start-topology
run *args="topologies/laptop.toml":
    bin/start-topology {{ args }}

# everything that CI runs
check:
    bin/test --all

# lint, types and the fast tests
test *args:
    bin/test --fast {{ args }}

# format, and mend what the linter can
fmt: setup
    .venv/bin/ruff format
    .venv/bin/ruff check --fix

# before a commit: format, lint, types, layers, and the tests of the files that differ from main
ready base="main": fmt
    .venv/bin/pyright --pythonpath .venv/bin/python
    .venv/bin/python -m pytest -q tests/test_layers.py tests/test_wording.py $(.venv/bin/python -m tests.support.changed {{ base }})

# measure; writes docs/results; what each benchmark measures is in docs/reference/benchmarks.md
bench *names: setup
    .venv/bin/python -m tests.bench --results docs/results {{ names }}

# train with every estimator, loss and correction, about an hour; begun again it leaves out what has run; writes docs/results
algorithms *names: setup
    .venv/bin/python -m tests.learning --resume .learning --results docs/results {{ names }}

# train on samples of weights that are four steps old, with each correction; writes docs/results
staleness *names: setup
    .venv/bin/python -m tests.learning --cases staleness --resume .learning --results docs/results {{ names }}

# train with a tool and with an environment, three seeds each; begun again it leaves out what has run; writes docs/results
tools *names: setup
    .venv/bin/python -m tests.learning --cases tools --resume .learning-tools --results docs/results {{ names }}

# the demo of a real model on both cores, twelve minutes for each of three seeds; begun again it leaves out what has run; writes README and docs/results
demo-smollm2 *args: setup
    bin/setup --with smollm2
    .venv/bin/python -m tests.learning.demo --results docs/results --readme README.md {{ args }}

# graders on every row of GSM8K, and against math-verify where both answer; DIR has train.jsonl and test.jsonl; writes docs/results
rewards dir: setup
    .venv/bin/python -m tests.rewards {{ dir }} --results docs/results

# kill -9 every process of a run in turn
chaos: setup
    .venv/bin/python -m pytest -m chaos

# kill -9 anything at random for half an hour, then audit the run's log
kills *args="--minutes 30": setup
    .venv/bin/python -m tests.chaos.random_kills --results docs/results {{ args }}

# all that is asked of SGLang's own server; ends with a matrix, which is also a page in docs/results
sglang *args: setup setup-sglang
    .venv/bin/python -m pytest -m "sglang or nightly" -n 0 --results docs/results tests/sglang tests/test_sglang_lock.py {{ args }}

# the tests of SGLang's own server on what its makers ask for; begun again it leaves out what has passed; writes docs/results
sglang-upstream *args: setup setup-sglang-upstream
    PHYSARUM_SGLANG_PYTHON=$PWD/.venv-sglang-upstream/bin/python .venv/bin/python -m pytest -m "sglang or nightly" -n 0 tests/sglang tests/test_sglang_lock.py --resume .nightly-upstream-passed --results docs/results {{ args }}

# the trainer in every parallel layout and form; writes docs/results
grid *args: setup
    PHYSARUM_WRITE_GRID=1 .venv/bin/python -m pytest -m "grid or nightly" -n 0 --results docs/results tests/grid tests/chaos/test_ranks.py {{ args }}

# runs on several machines of namespaces, and on Debian's Slurm in .slurm; needs root; begun again it leaves out what has passed; writes docs/results
nodes *args: setup
    tests/support/machines/install_slurm.sh
    PHYSARUM_NODES=required .venv/bin/python -m pytest -m nodes -n 0 tests/nodes --resume .nodes-passed --results docs/results {{ args }}

# runs that Debian's Prometheus scrapes; what is missing on this machine is said
observe *args: setup
    .venv/bin/python -m pytest -m observe -n 0 --results docs/results tests/observe {{ args }}

# every order of events of small runs, with deaths: about 10^7 states, an hour
model *args: setup
    .venv/bin/python -m pytest -m "nightly or not nightly" -n 0 tests/model {{ args }}

# simulated runs with faults, by seed: --first N --seeds N; a run that breaks is printed with its seed and the faults that it takes
simulate *args="--seeds 1000": setup
    .venv/bin/python -m tests.simulate {{ args }}

# plant small faults in the core of the books, and say who catches each, an hour
mutants *args: setup
    .venv/bin/python -m tests.model.mutants {{ args }}

# what is too long for every change, some hours, then SGLang on what its makers ask for; begun again it leaves out what has passed; writes docs/results
nightly *args: setup setup-sglang
    bin/setup --with smollm2 --if-needed
    .venv/bin/python -m pytest -m nightly -n 0 tests --resume .nightly-passed --results docs/results {{ args }}; code=$?; just sglang-upstream {{ args }} && exit $code

# what needs a GPU: one JSON, and a page in docs/results; PHYSARUM_PYTHON names an interpreter with a CUDA torch, where there is no .venv
test-gpu *args:
    [ -n "${PHYSARUM_PYTHON:-}" ] || bin/setup
    "${PHYSARUM_PYTHON:-.venv/bin/python}" -m tests.gpu --results docs/results {{ args }}
