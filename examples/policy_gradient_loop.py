"""A policy-gradient loop in plain PyTorch that takes only its credit from longstep.

    python examples/policy_gradient_loop.py [iterations]

The policy is a table of action preferences, one row for each state; put a language model in its place and the rest stays
as it is. Each iteration plays every task eight times and pushes up what did better than the others in the same state.
"""

import sys

import torch

from longstep.credit import gigpo
from longstep.envs import KeyDoorEnv
from longstep.envs.keydoor import ACTIONS
from longstep.state_key import state_key

NUM_TASKS, GROUP_SIZE, TABLE_SIZE = 2, 8, 2**14


def allowed_logits(policy, rows, admissible):
    """Preferences of each state's row, minus infinity where an action is not admissible."""
    mask = torch.tensor([[action in allowed for action in ACTIONS] for allowed in admissible])
    return policy(torch.tensor(rows)).masked_fill(~mask, -torch.inf)


def play(policy, envs, generator):
    """One episode in each environment: a dictionary of columns with a row for each step."""
    names = ("reward", "trajectory", "group", "key", "row", "allowed", "action")
    columns = {name: [] for name in names}
    current = {at: env.reset(seed=at // GROUP_SIZE) for at, env in enumerate(envs)}
    num_solved = 0
    while current:
        keys = [state_key(observation) for observation, _ in current.values()]
        rows = [int.from_bytes(key[:4], "little") % TABLE_SIZE for key in keys]
        admissible = [info["admissible_actions"] for _, info in current.values()]
        with torch.no_grad():
            chances = allowed_logits(policy, rows, admissible).softmax(-1)
        actions = torch.multinomial(chances, 1, generator=generator).squeeze(-1).tolist()
        choices = zip(list(current), keys, rows, admissible, actions, strict=True)
        for at, key, row, allowed, action in choices:
            observation, reward, terminated, truncated, info = envs[at].step(ACTIONS[action])
            step = (reward, at, at // GROUP_SIZE, key, row, allowed, action)
            for name, value in zip(names, step, strict=True):
                columns[name].append(value)
            current[at] = (observation, info)
            if terminated or truncated:
                num_solved += info["success"]
                del current[at]
    return columns, num_solved / len(envs)


def train(num_iterations, seed=0):
    """The success rate of each iteration."""
    generator = torch.Generator().manual_seed(seed)
    policy = torch.nn.Embedding(TABLE_SIZE, len(ACTIONS))
    torch.nn.init.zeros_(policy.weight)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.3)
    envs = [KeyDoorEnv(num_rooms=1) for _ in range(NUM_TASKS * GROUP_SIZE)]
    rates = []
    for iteration in range(num_iterations):
        steps, rate = play(policy, envs, generator)
        credit = gigpo(*(steps[name] for name in ("reward", "trajectory", "group", "key")))
        logits = allowed_logits(policy, steps["row"], steps["allowed"])
        chosen = torch.tensor(steps["action"])[:, None]
        log_chances = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
        loss = -(torch.from_numpy(credit.total) * log_chances).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.append(rate)
        print(f"iteration {iteration:3}  success {rate:.2f}  steps {len(chosen):4}")
    return rates


if __name__ == "__main__":
    rates = train(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
    print(f"success {sum(rates[:5]) / 5:.2f} at first, {sum(rates[-5:]) / 5:.2f} at last")
