package tunnel

import (
	"strconv"
	"strings"
)

// Printable replaces each character that is neither a letter, a digit, a sign nor a space by a question mark. So a text
// of a peer cannot move the cursor of a terminal, or begin another line of a log.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r == 0xFFFD || !strconv.IsPrint(r) { // 0xFFFD stands for bytes that are not UTF-8
			return '?'
		}
		return r
	}, s)
}
