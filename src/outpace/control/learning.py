"""What a step teaches: costs, acceptances, and whether drafting keeps what it promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outpace.control.acceptance import Outcome
from outpace.control.branches import learn
from outpace.control.floor import enter
from outpace.control.knowledge import Knowledge
from outpace.control.probing import ProbingBudget
from outpace.control.report import Prospect, Tally
from outpace.control.requests import RequestState
from outpace.control.resting import Resting
from outpace.control.step import StepPlan
from outpace.control.trying import Trying
from outpace.decisions import ControlReport, DrafterReport, StepFacts

__all__ = ["Learning"]

_WORST_CALL = 3.0
"""Calls that took longer than this many times what was expected are not all held against drafting."""


class Learning:
    """Takes in steps and keeps the counts.

    Args:
        knowledge: what is learnt.
        budget: of probes, which grows with the seconds that pass.
        trying: who is tried when.
    """

    def __init__(self, knowledge: Knowledge, budget: ProbingBudget, trying: Trying) -> None:
        self._knowledge = knowledge
        self._budget = budget
        self._trying = trying
        self.resting = Resting()
        self._looks_up = ""
        self.restart_report()

    def restart_report(self) -> None:
        """Counts begin anew."""
        self._tallies: dict[str, Tally] = {}
        self._budget.spent = 0.0
        self._steps = 0
        self._seconds = 0.0
        self._expected_tokens = 0.0
        self._expected_seconds = 0.0
        self._plain_tokens = 0
        self._plain_seconds = 0.0

    def tally(self, drafter: str) -> Tally:
        found = self._tallies.get(drafter)
        if found is None:
            found = self._tallies[drafter] = Tally()
        return found

    def note(self, drafter: str, prospect: Prospect | None) -> None:
        """Why nothing is drafted; None if something is, or may be."""
        tally = self.tally(drafter)
        tally.prospect, tally.noted = prospect, self._trying.now

    def observe(self, facts: StepFacts, step: StepPlan) -> None:
        """A step is over."""
        target = self._knowledge.target
        if not target.now.has_scale:  # nothing was timed before, so nothing was foreseen
            step.drafting = sum(call.seconds for call in facts.calls)
        rows = facts.rows
        self._compare(facts, step)
        if rows:
            target.observe(facts.threads, rows, facts.prefill_rows, facts.seconds)
        unit = target.now.seconds(1)
        calls = 0.0
        for call in facts.calls:
            self._knowledge.costs(call.drafter).observe(call, unit)
            self.tally(call.drafter).drafting += call.seconds
            calls += call.seconds
        if not facts.decoding:
            return
        self._trying.now += 1
        self._steps += 1
        self._seconds += facts.seconds + calls + facts.lookups
        decoding = len(facts.decoding)
        self._budget.earn(facts.seconds + calls + facts.lookups, target.now.seconds(decoding))
        states = [self._knowledge.requests[request_id] for request_id in facts.decoding]
        for state in states:
            state.num_tokens += 1
            state.num_steps += 1
        if facts.drafts or facts.calls:
            accepted = self._learn_drafts(facts, step)
            self._learn_silence(facts, step)
            self._account(facts, step, accepted, calls)
        elif step.probes:
            self._empty_probes(facts, step)
        if facts.lookups:
            self._judge_lookups(facts)
            if step.looked_up is not None:
                self._looks_up = step.looked_up
                self.tally(step.looked_up).drafting += facts.lookups
        self._keep_accounts(facts, step, calls, states)

    def _judge_lookups(self, facts: StepFacts) -> None:
        """What looking up has brought, and took."""
        now, decoding, computing = self._knowledge.target.now, len(facts.decoding), {c.drafter for c in facts.calls}
        looked_up = [seen for seen in facts.drafts if seen.offer.drafter not in computing]
        kept, tokens = sum(seen.num_accepted for seen in looked_up), sum(seen.offer.num_tokens for seen in looked_up)
        verifying = now.seconds(facts.rows) - now.seconds(facts.rows - tokens)
        plain = now.seconds(decoding)
        self.resting.observe(decoding, kept * plain / decoding - verifying, facts.lookups, plain)

    def _keep_accounts(self, facts: StepFacts, step: StepPlan, calls: float, states: Sequence[RequestState]) -> None:
        """What the step was to bring and to take, by request: neither luck nor a stall is a draft's fault.

        What a drafter catches up with is an investment of those it drafts for; the others only wait for it.
        """
        now = self._knowledge.target.now
        self._knowledge.requests.running = set(facts.decoding)
        plain = now.seconds(len(facts.decoding))
        rows = facts.rows
        bare = facts.prefill_rows + len(facts.decoding)
        verifying = plain if rows == bare else plain + now.seconds(rows) - now.seconds(bare)
        own = verifying + min(max(0.0, calls - step.delay), _WORST_CALL * step.drafting)
        others = verifying + min(calls, _WORST_CALL * (step.drafting + step.delay))
        expected, asked = step.expected, step.asked
        brought = [1.0 + expected.get(request_id, 0.0) for request_id in facts.decoding]
        enter(states, brought, plain, [own if request_id in asked else others for request_id in facts.decoding])

    def _compare(self, facts: StepFacts, step: StepPlan) -> None:
        """Notes what was predicted, before it is known better."""
        now, decoding = self._knowledge.target.now, len(facts.decoding)
        if facts.prefill_rows or not decoding or not now.has_scale:
            return
        plain = now.seconds(decoding)
        self._plain_tokens += decoding
        self._plain_seconds += plain
        self._expected_tokens += decoding + sum(step.expected.values())
        self._expected_seconds += plain if step.total is None else step.total

    def _learn_drafts(self, facts: StepFacts, step: StepPlan) -> int:
        """Returns the draft tokens that were kept."""
        knowledge, total = self._knowledge, 0
        outcomes: dict[str, list[Outcome]] = {}
        for seen in facts.drafts:
            offer, accepted = seen.offer, min(seen.num_accepted, seen.offer.num_tokens)
            if not offer.num_tokens:
                continue
            name, request_id = offer.drafter, offer.request_id
            if request_id not in step.expected:
                step.expected[request_id] = sum(knowledge.survival(offer, offer.num_tokens))
            outcome = learn(knowledge.acceptance(name), knowledge.own(request_id, name), seen)
            outcomes.setdefault(name, []).append(outcome)
            if outcome[4]:
                knowledge.branch_pace(name).hasten(self._trying.now)
            knowledge.requests[request_id].num_tokens += accepted
            tally = self.tally(name)
            tally.drafts += 1
            tally.tokens += offer.num_tokens
            tally.accepted += accepted
            tally.expected += step.expected[request_id]
            if request_id in step.probes:
                self._trying.tried(request_id, name, accepted > 0)
            else:
                self._trying.drafted(request_id, name)
                self.note(name, None)
            total += accepted
        for name, several in outcomes.items():
            knowledge.acceptance(name).observe(several)
        if step.probes:
            self._empty_probes(facts, step)
        return total

    def _learn_silence(self, facts: StepFacts, step: StepPlan) -> None:
        """Who was asked and found nothing, where it was not because there was too much to catch up with."""
        ready = {call.drafter for call in facts.calls if call.catch_up_rows >= step.behind.get(call.drafter, 0)}
        for request_id, allotment in step.asked.items():
            if allotment.drafter is not None and allotment.drafter in ready:
                self._knowledge.asked(request_id, allotment.drafter, request_id in step.expected)

    def _empty_probes(self, facts: StepFacts, step: StepPlan) -> None:
        """Of drafters that had nothing, or are still catching up."""
        for request_id in step.probes.difference(seen.offer.request_id for seen in facts.drafts):
            asked = step.asked.get(request_id)
            if asked is not None and asked.drafter is not None:
                self._trying.tried(request_id, asked.drafter, False)

    def _account(self, facts: StepFacts, step: StepPlan, accepted: int, calls: float) -> None:
        """What drafts added to the step."""
        now, decoding = self._knowledge.target.now, len(facts.decoding)
        shares: dict[str, int] = {}
        for seen in facts.drafts:
            shares[seen.offer.drafter] = shares.get(seen.offer.drafter, 0) + seen.offer.num_tokens
        tokens = sum(shares.values())
        rows = facts.prefill_rows + decoding + tokens
        drafted = now.seconds(rows)
        # Of the seconds that really passed, so that a stall or a busy core is not taken for the price of a draft.
        plain = facts.seconds * now.seconds(rows - tokens) / drafted
        if not facts.prefill_rows and not step.probes:
            one = now.seconds(decoding)  # not the seconds that really passed: a stall is no draft's fault
            took = drafted + min(calls, _WORST_CALL * step.drafting)
            self._budget.lose(took - one * (1.0 + accepted / decoding), one)
        promised = sum(step.expected.values())
        for name, count in shares.items():
            tally = self.tally(name)
            tally.verifying += (facts.seconds - plain) * count / max(1, tokens)
            tally.used_tokens += decoding + accepted
            tally.used_expected += decoding + promised
            tally.used_seconds += facts.seconds + calls + facts.lookups
            tally.used_expected_seconds += facts.seconds + step.drafting + facts.lookups
            tally.used_plain_tokens += decoding
            tally.used_plain_seconds += plain

    def report(self) -> ControlReport:
        drafters: dict[str, DrafterReport] = {
            name: tally.report(name, self._trying.now) for name, tally in self._tallies.items()
        }
        looks_up, rests = self._looks_up, self.resting.reason()
        if looks_up in drafters and rests is not None:
            drafters[looks_up] = replace(drafters[looks_up], off=f"{looks_up}: {rests}")
        return ControlReport(
            drafters,
            self._steps,
            self._seconds,
            self._budget.spent,
            self._expected_tokens,
            self._expected_seconds,
            self._plain_tokens,
            self._plain_seconds,
        )
