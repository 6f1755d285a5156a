package tunnel

import (
	"bytes"
	"encoding/pem"
	"fmt"
)

// PEMBlocks returns the blocks of a PEM text (RFC 7468). If a block is cut off or damaged, PEMBlocks returns the blocks
// before it and an error. The text may have other lines between the blocks, as section 2 permits.
func PEMBlocks(text []byte) (blocks []*pem.Block, err error) {
	for {
		block, rest := pem.Decode(text)
		read, sound := text, 0
		if block != nil {
			read, sound = text[:len(text)-len(rest)], 1
		}
		if begun(read) > sound { // pem.Decode skips what it does not understand
			return blocks, fmt.Errorf("block %d of the text is cut off or not PEM", len(blocks)+1)
		}
		if block == nil {
			return blocks, nil
		}
		blocks, text = append(blocks, block), rest
	}
}

// begun returns how many blocks begin in a text: a block begins with a line of its own.
func begun(text []byte) int {
	const line = "-----BEGIN"
	n := bytes.Count(text, []byte("\n"+line))
	if bytes.HasPrefix(text, []byte(line)) {
		n++
	}
	return n
}
