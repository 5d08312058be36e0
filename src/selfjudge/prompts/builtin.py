"""A few built-in prompts of different kinds, so that demo and bench need no data."""

from __future__ import annotations

BUILT_IN: tuple[tuple[str, str], ...] = (
    ("math", "A baker makes 24 muffins every morning and sells 17 of them. She gives the rest to her neighbours, who"
             " are 7 families. How many muffins does each family get in 5 days? Reason step by step."),
    ("open", "Why is the sky blue?"),
    ("code", "Write a Python function that checks whether a word is a palindrome."),
    ("summary", "Summarise in two sentences: The city council voted on Tuesday to close the old bridge for repairs. The"
                " work will take eight months and cost four million dollars. Drivers will have to use the northern"
                " tunnel, which already carries most of the morning traffic. Shop owners near the bridge fear for their"
                " income and asked the mayor for help."),
    ("math", "Tom has 3 boxes with 12 pencils each. He loses 5 pencils and buys 2 more boxes. How many pencils does he"
             " have now? Reason step by step."),
    ("open", "Give me three tips for learning to play the piano as an adult."),
    ("code", "Write a Python function that returns the n largest numbers of a list."),
    ("chat", "I am nervous about my first day at a new job. What should I do?"),
    ("math", "A train travels 60 miles in one hour. How far does it travel in 3 and a half hours? Reason step by"
             " step."),
    ("open", "What is photosynthesis and why does it matter?"),
    ("code", "Explain what this code does: `[x * x for x in range(10) if x % 2 == 0]`"),
    ("list", "List five healthy breakfasts that take less than ten minutes."),
    ("math", "What is 15% of 240? Reason step by step."),
    ("rewrite", "Rewrite this sentence politely: Send me the report now."),
    ("open", "Describe the water cycle for a child."),
    ("code", "How do I read a text file line by line in Python?"),
    ("math", "If 4 painters paint a house in 6 days, how many days do 3 painters need? Reason step by step."),
    ("story", "Write a short story about a lighthouse keeper who finds a message in a bottle."),
    ("open", "What are the main differences between a virus and a bacterium?"),
    ("list", "Give me a packing list for a weekend in the mountains."),
    ("code", "Write a SQL query that counts the customers of each country."),
    ("summary", "Summarise in one sentence: Honey bees visit flowers to collect nectar. While doing so they carry"
                " pollen from one flower to the next, which lets many plants bear fruit. Farmers therefore often keep"
                " hives near their orchards."),
    ("math", "Sara reads 20 pages a day. Her book has 310 pages. After how many days has she finished it? Reason step"
             " by step."),
    ("open", "Who was Ada Lovelace?"),
)  # fmt: skip
