#!/bin/sh
# The drafters that come with outpace for SmolLM2-135M-Instruct: an EAGLE-3 head and an adapter of an early exit.
#
#     sh recipes/smollm2-135m-instruct.sh [FOLDER]
#
# Needs the default model (`make setup`), matplotlib for the curves, 3 GB of disk and some hours on two cores. Data are
# the model's own answers to built-in prompts, a third of which ask about pieces of Python's standard library. A step
# that was stopped goes on where it was when the script is started again.
set -eu
cd "$(dirname "$0")/.."
out=${1:-build/smollm2-135m-instruct}
bin=.venv/bin
model=smollm2-135m

train() {  # KIND OPTIONS...
    if [ -f "$out/$1/checkpoint.pt" ]; then
        "$bin/outpace" train "$1" --resume "$out/$1"
    else
        "$bin/outpace" train "$@" --model $model --data "$out/data" --out "$out/$1"
    fi
}

"$bin/outpace" train data --model $model --prompts builtin --max-prompts 2304 --max-tokens 256 --batch 48 --out "$out/data"
train eagle3 --steps 1600 --batch-windows 2 --lr 1.5e-3 --warmup 60 --eval-every 200 --eval-windows 20 --chain 4
train early-exit --exit-layers 10 --steps 1800 --batch-windows 2 --lr 1e-3 --warmup 60 --eval-every 200 \
    --eval-windows 20 --chain 4
"$bin/python" benchmarks/drafters.py --model $model --head "$out/eagle3/drafter" \
    --adapter "$out/early-exit/drafter" --max-tokens 96 --threads 2 --json "$out/drafters.json" --plot docs/drafters.png
"$bin/python" recipes/ship.py --model $model --eagle3 "$out/eagle3" --early-exit "$out/early-exit" \
    --name smollm2-135m-instruct --measured "$out/drafters.json"
