"""Which pipeline method trains to which loss, after how many samples and in how much predicted time.

python -m benchmarks.study           trains what results.jsonl lacks, then writes the table and the pictures
python -m benchmarks.study --quick   a minute of it, to a file in a temporary place
"""
