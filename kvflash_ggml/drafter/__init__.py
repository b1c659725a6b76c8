"""The small model of the policy `drafter`."""
