"""A change of layout in memory: slices of global tensors go from where they lie to where they are needed.

Every rank describes its state as pieces (boxes.py): boxes of global tensors and where they lie in its arena, as
megatron-core's ShardedTensor has them (atlas.py). The plan is the intersection of what there is with what is wanted
(plan.py), the same on every rank; it is carried out in bounded messages (move.py), and judged by digests that do not
depend on how a tensor is cut (digest.py). The old arenas are only read: until everybody has the new layout, going back
costs nothing.
"""
