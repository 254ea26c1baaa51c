"""Foundations without a word of the domain: files, tasks, gates. Imports nothing of the project."""
