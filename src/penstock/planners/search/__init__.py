"""Our own planner: every choice together, scored by the simulator of the schedule that will run.

find.py       the search itself: bound first, then candidates best first, then small changes to the best
space.py      what may be chosen: methods, micro-batches, orders of devices
places.py     runs of neighbouring devices in an order: their speed, memory, all-reduce and hop
labels.py     the best cut for every depth by dynamic programming, under memory
lift.py       labels as candidates; chunked and enumerated ones
bound.py      what no plan can beat
climb.py      small changes that the simulator likes
candidate.py  one plan in the making
"""
