package tunnel

import (
	"bytes"
	"encoding/pem"
	"errors"
)

// PEMBlocks returns the blocks of a PEM text (RFC 7468). It returns an error beside them if a block is cut off or
// damaged. The text may have other lines between the blocks, as section 2 permits.
func PEMBlocks(text []byte) (blocks []*pem.Block, err error) {
	begun := bytes.Count(text, []byte("-----BEGIN "))
	for {
		block, rest := pem.Decode(text)
		if block == nil {
			break
		}
		blocks, text = append(blocks, block), rest
	}
	if len(blocks) < begun { // pem.Decode skips what it does not understand
		return blocks, errors.New("the text is cut off or not PEM")
	}
	return blocks, nil
}
