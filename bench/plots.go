package main

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"slices"
)

// plot shows what each way makes of a figure, as a multiple of one of them, on a scale of
// powers of two; better is to the right.
type plot struct {
	title string
	base  string // id of the way whose multiples they are
	rows  []*row
	names []string // of rows
	ways  []peer
}

// plots are those of a report, by name.
func (r *report) plots() map[string]*plot {
	speed := &plot{title: "On loopback: multiples of two TCP hops", base: "tcp"}
	far := &plot{title: "Over links: multiples of plain TCP", base: direct}
	for _, w := range r.Rows {
		link := slices.ContainsFunc(qualities(), func(q quality) bool { return q.name == w.Part })
		switch {
		case link:
			far.rows, far.names = append(far.rows, w), append(far.names, w.Part+": "+w.Name)
		case w.Part == speedPart:
			speed.rows, speed.names = append(speed.rows, w), append(speed.names, w.Name)
		}
	}
	all := map[string]*plot{"speed": speed, "links": far}
	for _, p := range all {
		p.ways = slices.DeleteFunc(r.present(), func(o peer) bool {
			return !slices.ContainsFunc(p.rows, func(w *row) bool { return w.Values[o.ID].measured() })
		})
	}
	return all
}

// goodness is how much better than the base a way is; 0: nobody knows.
func (p *plot) goodness(w *row, id string) float64 {
	v, base := w.Values[id], w.Values[p.base]
	switch {
	case !v.measured() || !base.measured():
		return 0
	case w.Small:
		return base.Median / v.Median
	}
	return v.Median / base.Median
}

const (
	plotText  = 380 // where the scale begins
	plotWidth = 900
	plotLine  = 22
	plotTop   = 70
	octaves   = 6 // to the left of 1, and to the right: a lossy link has rows of 60 times plain TCP
)

// at is the place of a multiple on the scale, which ends where it ends.
func at(v float64) float64 {
	o := min(octaves, max(-octaves, math.Log2(v)))
	return plotText + (o+octaves)/(2*octaves)*(plotWidth-plotText-20)
}

// svg draws the plot. It is drawn by hand: what a library of plots would take off us is less
// than this, and none of those makes a drawing that is legible on a dark page too.
func (p *plot) svg() []byte {
	colours := []string{"#e6550d", "#888888", "#3182bd", "#31a354", "#756bb1", "#d6b656"}
	var b bytes.Buffer
	height := plotTop + plotLine*len(p.rows) + 20
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">
<style>text { fill: #222 } line { stroke: #8884 } .one { stroke: #888 } `+
		`@media (prefers-color-scheme: dark) { text { fill: #ddd } }</style>
<text x="10" y="20" font-size="15">%s; right is better</text>
`, plotWidth, height, html.EscapeString(p.title))
	for i, w := range p.ways {
		x := 10 + i*130
		fmt.Fprintf(&b, "<circle cx=\"%d\" cy=\"40\" r=\"5\" fill=\"%s\"/><text x=\"%d\" y=\"44\">%s</text>\n", x+5,
			colours[i%len(colours)], x+15, html.EscapeString(w.Name))
	}
	for o := -octaves; o <= octaves; o++ {
		v, class := math.Pow(2, float64(o)), ""
		label := fmt.Sprintf("%g", v)
		if o < 0 {
			label = fmt.Sprintf("1/%g", 1/v)
		}
		if o == 0 {
			class = ` class="one"`
		}
		fmt.Fprintf(&b, "<line%s x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>", class, at(v), at(v), plotTop-4, height-16)
		fmt.Fprintf(&b, "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s</text>\n", at(v), height-4, label)
	}
	for i, w := range p.rows {
		y := plotTop + plotLine*i + plotLine/2
		fmt.Fprintf(&b, "<text x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n", plotText-10, y+4,
			html.EscapeString(p.names[i]))
		// Ours last, on top of the others.
		for j, o := range slices.Backward(p.ways) {
			if v := p.goodness(w, o.ID); v > 0 {
				fmt.Fprintf(&b, "<circle cx=\"%.1f\" cy=\"%d\" r=\"5\" fill=\"%s\"><title>%s: %s</title></circle>\n", at(v), y,
					colours[j%len(colours)], html.EscapeString(o.Name), digits(v))
			}
		}
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}
