#!/usr/bin/env bash
# Two builds of the program on one machine, run in turns: how much faster or slower each cell of the
# benchmark became. Prints a table of new time / old time; a cell's time is its best over the rounds:
# on a GPU the median of a round, on a CPU, where others disturb more, its shortest sample.
#
#   scripts/bench-pair.sh OLD_PROGRAM NEW_PROGRAM [ROUNDS [TOKENS [DEVICE]]]
#
