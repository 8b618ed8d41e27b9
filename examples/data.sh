# Sourced by scripts that read a folder of data.

# The file of a split, train or test, in a folder: `split_of FOLDER SPLIT`. Without one the folder itself, in which
# lightrft looks for shards.
split_of() {
  local file
  for file in "$1/$2".{parquet,jsonl,json}; do
    if [ -f "$file" ]; then echo "$file"; return; fi
  done
  echo "$1"
}
