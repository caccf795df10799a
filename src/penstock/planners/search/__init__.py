"""Our own planner: every choice together, scored by the simulator of the schedule that will run.

find.py       the search: a bound, then candidates best first, then small changes to the best
space.py      the choices: methods, micro-batches, orders of devices
places.py     runs of neighbouring devices in an order: their speed, memory, all-reduce and hop
labels.py     the best cut for every depth by dynamic programming, under memory
candidates.py labels as candidates; chunked and enumerated ones
scored.py     the plans that have been simulated, and which to simulate next
bound.py      the seconds that no plan can beat
climb.py      small changes that the simulator likes
candidate.py  one plan before it is simulated
"""
