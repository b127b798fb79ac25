"""The numbers of the work and of the faults, the same for every system; nothing is imported for them."""

from __future__ import annotations

LAYERS, HIDDEN, HEADS, SEQ_LENGTH, VOCABULARY = 4, 64, 4, 64, 256
WORLD_SIZE = 4
MICRO_BATCH = 2  # samples
NUM_MICRO_BATCHES = 8
SAMPLES = MICRO_BATCH * NUM_MICRO_BATCHES  # of an iteration
LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-3, 0.01, 1.0
SEED = 1234

FAULT_ITERATION = 25  # by then what a system keeps in reserve is there
COMPARED = 35  # iterations after which weights are compared with the undisturbed run's
STEADY = (10, 45)  # iterations between which an undisturbed run's CPU time is taken
REACTION_S_MAX = 120.0  # no commit by then: written as such
FULL_S_MAX = 45.0  # since the fault; a width that is not whole by then is written as such
REVIVE_S = 5.0  # what was killed from outside is started again so much later, as an operator or a scheduler would
