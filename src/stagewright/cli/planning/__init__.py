"""Verbs that plan: plan, forecast, explain, fit."""
