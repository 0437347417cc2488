"""Mutation tests of the judge (`python -m tests.ops.rollouts.mutants`): changes one decision at a
time in a copy of the tree, and requires that a test fails.

Exit code 0 if every mutant died, 1 if one survived, 2 if a test did not run.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Final

from rich.console import Console

from tests.security.guards import Mutant
from tests.security.mutants import hunt

if TYPE_CHECKING:
    from collections.abc import Sequence

_SIMULATED: Final = "loadtest/rollouts/test_simulated.py"
_UNLESS_BETWEEN: Final = "\n    if not 0.0 < share < 1.0:\n        return None"
_CHANGES: Final = {
    "inference": (
        ("range(count, draws + 1)", "range(count + 1, draws + 1)"),
        ("math.log1p((theta - 1.0) * share)", "math.log1p(theta * share)"),
        ("math.log(total / len(log_bets))", "math.log(total)"),
        ("on_stable * loss + on_canary * gain", "on_canary * gain"),
        ("(1 + as_high) / (1 + done)", "as_high / done"),
        (">= seen - 1e-9", "> seen + 1e-9"),
        ("as_high < level * (DRAWS + 1)", "as_high < 10"),
        ("sorted(groups.items())", "list(groups.items())"),
        ("assigned[None, :, 1]", "assigned[None, :, 0]"),
        ("rng.binomial(buckets, share,", "rng.binomial(buckets, 0.5,"),
        ("excess / error, nan", "excess, nan"),
        ("COST_ALPHA**2 * COST_PRIOR", "COST_ALPHA * COST_PRIOR"),
        ("squares / number - mean**2", "squares / number"),
    ),
    "evidence": (
        ("if request.chosen_at < self.began_at:", "if False:"),
        ("if request.version != (plan.candidate if", "if None and (plan.candidate if"),
        ("BucketTally(is_canary, not was_canary)", "BucketTally(is_canary, True)"),
        ("max(0, self.step - 1)", "self.step"),
        ("tally.is_fresh and name not in tally.bad", "tally.is_fresh"),
        ("tally.is_fresh and name not in tally.bad", "name not in tally.bad"),
        ("is_cold = request.chosen_at < self.warm_at", "is_cold = 0 > self.warm_at"),
        ("if len(self.warm_at) < MAX_USERS:", "if True:"),
        ("self.warm_at.get(request.user, self.now)", "self.warm_at.get(request.user, 0.0)"),
        ("2 * tally.is_canary + is_bad", "2 * (not tally.is_canary) + is_bad"),
        ("int(min(request.ended_at, self.now))", "int(request.ended_at)"),
        ("if second > oldest}", "}"),
        ("sorted(requests, key", "sorted(requests, reverse=True, key"),
        ("self.canary[1] += tally.is_canary", "self.canary[1] += 1"),
        ("self.canary[0] += tally.is_canary", "self.canary[0] += 1"),
        ("slot <= latest", "slot < latest"),
        ("if not 0.0 < canary_share < 1.0:", "if False:"),
        ("is_full = len(self.last_incident) >= MAX_WORKERS", "is_full = False"),
        ("incident.at < self.began_at or", ""),
        ("log_factors(canary_share)[is_canary]", "log_factors(0.5)[is_canary]"),
        (
            "canary.busy_s / expected_s[1] / (stable.busy_s / expected_s[0])",
            "canary.busy_s / stable.busy_s",
        ),
        ("min(expected_s) < MIN_BATCH_S or", ""),
        ("not self.is_burning(name, objective, is_canary=False)", "True"),
        ("objective.is_burning(good, bad - worst)", "True"),
        ("cost=self.cost,", ""),
        (
            "first_bad={name: [0, 0] for name in plan.objectives},",
            "first_bad={name: self.first_bad.get(name, [0, 0]) for name in plan.objectives},",
        ),
        ("if tally.is_fresh and name in tally.requests:", "if name in tally.requests:"),
        ("request.seconds[name] > objective.limit_s", "request.seconds[name] >= objective.limit_s"),
        ("if is_cold or name not in request.seconds:", "if name not in request.seconds:"),
    ),
    "plan": (
        ("BURN: Final = 14.4", "BURN: Final = 20.0"),
        ("return bad >= MIN_BAD and bad >= limit", "return bad >= limit"),
        ("min(BURN * (1.0 - self.good_share), MAX_BAD_SHARE)", "BURN * (1.0 - self.good_share)"),
        ("(len(self.objectives) + 1) / FAST_BUDGET", "1 / FAST_BUDGET"),
        ("max(1, self.last_step - 1) * len(self.objectives) * LOOKS", "LOOKS"),
        ("return DOUBT / len(self.objectives)", "return DOUBT"),
        ("(self.share(step) - before) / (1.0 - before)", "self.share(step) - before"),
        ("max(COST_ROLLBACK, accepted)", "COST_ROLLBACK"),
        ("self.accept_cost or COST_LIMIT", "COST_LIMIT"),
        ("before < after for before, after", "before <= after for before, after"),
        ("and self.shares[-1] == 1", ""),
        (
            "{self.stable: 1.0 - share, self.candidate: share}",
            "{self.stable: 1.0, self.candidate: share}",
        ),
    ),
    "judge": (
        ("binomial_tail(canary, stable + canary, share)", "0.0"),
        (
            "binomial_tail(canary, stable + canary, share)",
            "binomial_tail(bad, stable + bad, share)",
        ),
        ("CHANCE_LIMIT: Final = 1e-4", "CHANCE_LIMIT: Final = 1e-2"),
        ("CHANCE_LIMIT: Final = 1e-4", "CHANCE_LIMIT: Final = 1e-6"),
        ("1.0 - (is_new and ", "1.0 - ("),
        ("evidence.is_burning(name, objective, is_canary=True))", "True)"),
        ("if not evidence.golden_difference:", "if True:"),
        (
            f"share = plan.moved_share(evidence.step){_UNLESS_BETWEEN}",
            f"share = plan.share(evidence.step){_UNLESS_BETWEEN}",
        ),
        (
            "if log_e[name] < math.log(plan.fast_threshold):",
            "if log_e[name] < math.log(plan.fast_threshold) - 2:",
        ),
        (
            "if log_e[name] < math.log(plan.fast_threshold):",
            "if log_e[name] < math.log(plan.fast_threshold) + 2:",
        ),
        ("log_e[INCIDENTS] = log_e_value(evidence.incident_bets)", "log_e[INCIDENTS] = 0.0"),
        ("bounds is None or bounds[0] <= limit:", "bounds is None or bounds[1] <= limit:"),
        ("plan.costs is None or bounds is None", "bounds is None"),
        ("if was_good and not evidence.is_burning", "if not evidence.is_burning"),
        ('"rollback" if was_good else "hold"', '"rollback"'),
        ("back = max(0, evidence.step - 1)", "back = 0"),
        ("evidence.now - evidence.timed_from >= plan.max_step_s", "False"),
        ("max(evidence.timed_from, looked_at)", "evidence.timed_from"),
        ("if baked_s < plan.bake_s:", "if False:"),
        ("requests < plan.min_requests or ", ""),
        (" or buckets < plan.min_buckets", ""),
        ("and not (is_last and high > limit)", ""),
        ('"pause" if is_last and low > limit else "hold"', '"hold"'),
        ("if p_values[name] > plan.doubt_level:", "if p_values[name] > plan.step_level:"),
        ("if p_values[name] > plan.doubt_level:", "if True:"),
        ("if p_values[name] <= plan.step_level:", "if p_values[name] <= plan.doubt_level:"),
        ('"hold" if len(evidence.looks) + 1 < LOOKS else "pause"', '"hold"'),
        ('"hold" if len(evidence.looks) + 1 < LOOKS else "pause"', '"pause"'),
        ("name = min(p_values", "name = max(p_values"),
        ("said, name, next_step, look)", "said, name, next_step, None)"),
        ("said, name, look=look)", "said, name)"),
        ("min(evidence.step + 1, plan.last_step)", "plan.last_step"),
        (' {len(evidence.looks)}".encode()', '".encode()'),
    ),
    "forecast": (
        ("- max(daily_requests, default=0)", ""),
        ("-math.expm1(-requests * rate) for requests", "1 for requests"),
        ("plan.min_buckets / active, ", "0, "),
        (", plan.min_requests / requests)", ", 0)"),
        ("{max(least, share) for share in plan.shares}", "{least, 1.0}"),
        ("if needed <= first:", "if True:"),
    ),
}
"""Changes that the tests of their file must notice."""
_SIMULATED_CHANGES: Final = (
    ("judge", "binomial_tail(canary, stable + canary, share)", "0.0"),
    ("judge", "evidence.is_burning(name, objective, is_canary=True))", "True)"),
    ("judge", "requests < plan.min_requests or ", ""),
    ("judge", "if baked_s < plan.bake_s:", "if baked_s < plan.bake_s / 2:"),
    ("evidence", "tally.is_fresh and name not in tally.bad", "True"),
    ("evidence", "is_cold = request.chosen_at < self.warm_at", "is_cold = 0 > self.warm_at"),
    (
        "evidence",
        "canary.busy_s / expected_s[1] / (stable.busy_s / expected_s[0])",
        "canary.busy_s / stable.busy_s",
    ),
    ("evidence", "max(0, self.step - 1)", "self.step"),
    ("inference", "on_stable * loss + on_canary * gain", "on_canary * gain"),
)
"""Changes that the short form of the campaign must notice, too."""
_TESTED_BY: Final = {
    "inference": "test_inference.py",
    "evidence": "test_evidence.py",
    "plan": "test_plan.py",
    "judge": "test_judge.py",
    "forecast": "test_forecast.py",
}
MUTANTS: Final = (
    *(
        Mutant(name, f"ops/rollouts/{name}.py", guard, instead, f"ops/rollouts/{_TESTED_BY[name]}")
        for name, changes in _CHANGES.items()
        for guard, instead in changes
    ),
    *(
        Mutant("simulated", f"ops/rollouts/{name}.py", guard, instead, _SIMULATED)
        for name, guard, instead in _SIMULATED_CHANGES
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the mutants; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.ops.rollouts.mutants")
    parser.add_argument("kinds", nargs="*", choices=[*_CHANGES, "simulated", []])
    parser.add_argument("--processes", type=int, default=1, help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, soft_wrap=True)
    chosen = [one for one in MUTANTS if not options.kinds or one.attack in options.kinds]
    verdicts = hunt(chosen, options.processes, console)
    outcomes = [verdict.outcome for verdict in verdicts]
    for verdict in verdicts:
        if verdict.outcome in {"SURVIVED", "BROKEN"}:
            mutant = verdict.mutant
            console.print(f"{verdict.outcome} {mutant.file}: {mutant.guard}", markup=False)
            console.print(f"  -> {mutant.instead}\n{verdict.output[-2000:]}", markup=False)
    console.print(f"{len(verdicts)} mutants, {outcomes.count('SURVIVED')} survived")
    return 2 if "BROKEN" in outcomes else int("SURVIVED" in outcomes)


if __name__ == "__main__":
    sys.exit(main())
