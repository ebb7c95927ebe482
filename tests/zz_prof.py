import sys, time, os, faulthandler
import test_rank_rollouts as t


def timed(ranks):
    faulthandler.dump_traceback_later(25, exit=True)
    t.rollouts(ranks, t.CASES["nothing to do"])
    s = time.time()
    t.rollouts(ranks, t.CASES["one slow rank"])
    print(ranks.index, "slow", time.time() - s, file=sys.stderr, flush=True)
    for name, (_, case) in t.FAILURES.items():
        s = time.time()
        t.fail(ranks, case)
        print(ranks.index, name, time.time() - s, file=sys.stderr, flush=True)
    s = time.time()
    t.follow(ranks)
    print(ranks.index, "follow", time.time() - s, file=sys.stderr, flush=True)
