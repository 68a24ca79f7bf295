"""A trainer for `test_a_trainer_that_slept...`: answers each line of its input with what became of some requests."""

import sys

from actor_helpers import gather, plain_pool, requests

if __name__ == "__main__":
    with plain_pool(1, lost_after_s=2.0) as pool:
        for turn, _ in enumerate(sys.stdin):
            pool.submit(requests("say x", 5, f"{turn}-"))
            got = gather(pool, 5)
            print(len(got), pool.actor_pids[0], pool.stats().num_restarts, flush=True)
