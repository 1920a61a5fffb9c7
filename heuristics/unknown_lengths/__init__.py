"""Policies for groups of completions of unknown lengths, as in rollouts of RL training."""
