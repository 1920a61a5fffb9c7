"""Policies for groups of completions whose lengths nobody knows, as in the rollouts of RL training."""
