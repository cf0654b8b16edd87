"""One look for every chart: `style` has the colours, `drawing` the kinds of charts, `svg` puts them into a page.

Importing a module of this package imports matplotlib, which takes half a second: do so where something is drawn.
"""
