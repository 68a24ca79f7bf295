"""The journal of a client: what it remembers of each slot is what a log of that slot alone would hold."""

from hypothesis import given, settings
from hypothesis import strategies as st

from longstep import Task
from longstep_bindings.envs import recovery
from longstep_bindings.envs.recovery import History, Journal, keys_of, mismatch, replays
from longstep_bindings.envs.transport_bench import TextEnv

NUM_SLOTS = 4
ROWS = st.dictionaries(
    st.integers(0, NUM_SLOTS - 1),
    st.tuples(st.booleans(), st.sampled_from(["runs", "runs", "runs", "over", "failed"])),
    min_size=1,
)
EVENTS = st.lists(
    st.one_of(ROWS, st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(0, NUM_SLOTS - 1)))
)


class Logs:
    """A log for each slot."""

    def __init__(self):
        self.histories, self.in_episode = {}, [False] * NUM_SLOTS

    def take(self, slot, task, action, key, end):
        if end == "failed":
            self.histories.pop(slot, None)
        elif task:
            self.histories[slot] = History(task, [], [key])
        else:
            self.histories[slot].actions.append(action)
            self.histories[slot].keys.append(key)
        self.in_episode[slot] = end == "runs"

    def follow(self, slot, source):
        task, actions, keys = self.histories[source]
        self.histories[slot] = History(task, list(actions), list(keys))
        self.in_episode[slot] = self.in_episode[source]


def write(journal, number, rows, repeat):
    """A message in which each slot is reset or stepped; in both ways of writing, and perhaps twice."""
    slots = list(rows)
    tasks = [row[0] for row in rows.values()]
    told = {
        "failed": [row[3] == "failed" for row in rows.values()],
        "over": [row[3] == "over" for row in rows.values()],
    }
    if True not in told["failed"]:
        told["failed"] = []
    columns = [[row[index] for row in rows.values()] for index in (1, 2)]
    for _ in range(1 + repeat):
        journal.add(number, slots, tasks if any(tasks) else None, *columns, **told)


@settings(max_examples=200, deadline=None)
@given(EVENTS, st.booleans(), st.integers(1, 12))
def test_histories_are_those_of_a_log_for_each_slot(events, repeat, few_rows):
    in_episode = [False] * NUM_SLOTS
    journal, logs = Journal(in_episode), Logs()
    journal._many_rows = few_rows  # so that it throws rows away all the time
    for number, event in enumerate(events, 1):
        if isinstance(event, tuple):
            slot, source = event
            if slot != source and source in logs.histories:
                journal.follow(slot, source, number)
                logs.follow(slot, source)
            continue
        rows = {}
        for slot, (begins, end) in event.items():
            begins = begins or not logs.in_episode[slot]
            task = Task(env_id="e", seed=number) if begins else None
            rows[slot] = (task, None if begins else f"{number} {slot}", f"key {number}", end)
            logs.take(slot, *rows[slot])
        write(journal, number, rows, repeat)
        journal._many_rows = min(journal._many_rows, few_rows + 2 * journal._num_rows)
        assert in_episode == logs.in_episode
    assert journal.histories(range(NUM_SLOTS)) == logs.histories
    for slot in range(NUM_SLOTS):
        assert journal.history(slot) == logs.histories.get(slot)


def test_rows_of_finished_episodes_are_thrown_away():
    journal = Journal([False] * 100)
    slots, task = list(range(100)), Task(env_id="e", seed=1)
    for number in range(1, 2001):
        tasks = [task] * 100 if number % 50 == 1 else None
        over = [number % 50 == 0] * 100
        journal.add(number, slots, tasks, slots, slots, failed=[], over=over)
    assert journal._num_rows <= recovery._FEW_ROWS + 2 * 50 * 100
    assert len(journal._entries) <= 200
    assert journal.history(3).actions == [3] * 49


def test_replays_are_cut_into_pieces_whose_keys_add_up():
    history = History(Task(env_id="e", seed=5), list("abcdefg" * 30), list(range(211)))
    pieces = list(replays(history))
    assert [start for (start, _), _ in pieces] == [[5, None], None, None, None]
    assert [action for (_, actions), _ in pieces for action in actions] == history.actions
    assert [key for _, keys in pieces for key in keys] == history.keys
    (only,) = replays(History(Task(env_id="e", seed=5, options={"a": 1}), [], ["key"]))
    assert only == ([[5, {"a": 1}], []], ["key"])


def test_what_differs_is_told_with_its_step():
    texts = [TextEnv().reset()[0], "other"]
    keys = keys_of(texts, None)
    assert mismatch(texts, keys, 0, is_agent=False) is None
    assert "after 8 steps differs" in mismatch([texts[0], "changed"], keys, 7, is_agent=False)
    assert "did not replay every step" in mismatch(texts[:1], keys, 0, is_agent=False)
    infos = [{"state_key": b"one"}, {}]
    assert keys_of(["", ""], infos) == [b"one", None]
    assert keys_of([1, object()], None)[1] is None
