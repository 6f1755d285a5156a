package tunnel

import (
	"bytes"
	"encoding/pem"
	"slices"
	"testing"
)

func TestPEMBlocks(t *testing.T) {
	block := func(typ string) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: bytes.Repeat([]byte(typ), 10)})
	}
	one, two := block("CERTIFICATE"), block("PRIVATE KEY")
	for _, c := range []struct {
		name string
		text []byte
		want []string // types
		cut  bool
	}{
		{"nothing", nil, nil, false},
		{"no PEM", []byte("hello\n"), nil, false},
		{"two blocks", slices.Concat(one, two), []string{"CERTIFICATE", "PRIVATE KEY"}, false},
		{"other lines", slices.Concat([]byte("# first\n"), one, []byte("# second\n"), two, []byte("# end\n")),
			[]string{"CERTIFICATE", "PRIVATE KEY"}, false},
		{"the end is cut off", slices.Concat(one, two[:len(two)-40]), []string{"CERTIFICATE"}, true},
		{"the first block is cut off", slices.Concat(one[:len(one)-40], []byte("\n"), two), nil, true},
		{"the second block is cut off", slices.Concat(one, two[:len(two)-40], []byte("\n"), one),
			[]string{"CERTIFICATE"}, true},
		{"a block behind #", slices.Concat(bytes.ReplaceAll(append([]byte("\n"), two...), []byte("\n"), []byte("\n# ")),
			[]byte("\n"), one), []string{"CERTIFICATE"}, false},
		{"a line that names the first line", slices.Concat([]byte("# see -----BEGIN CERTIFICATE-----\n"), one),
			[]string{"CERTIFICATE"}, false},
		{"cut off in the first line", slices.Concat(one, []byte("-----BEGIN")), []string{"CERTIFICATE"}, true},
		{"only its first line", []byte("-----BEGIN CERTIFICATE-----\n"), nil, true},
		{"no base64", []byte("-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n"), nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			blocks, err := PEMBlocks(c.text)
			var got []string
			for _, b := range blocks {
				got = append(got, b.Type)
			}
			if !slices.Equal(got, c.want) || (err != nil) != c.cut {
				t.Errorf("got blocks %q and the error %v, want blocks %q and an error: %v", got, err, c.want, c.cut)
			}
		})
	}
}
