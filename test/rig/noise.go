package rig

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"time"
)

// Noise is what streams are made of, again and again. Its length is prime, so that no
// lost or doubled block of a round size goes unnoticed.
var Noise = func() []byte { //nolint:gochecknoglobals // it never changes
	b := make([]byte, 65521)
	rand.NewChaCha8([32]byte{'t', 'u', 'n', 'n', 'e', 'l'}).Read(b) //nolint:errcheck // it never fails
	return b
}()

// ErrCorrupt says that bytes are missing or wrong.
var ErrCorrupt = errors.New("bytes are missing or wrong")

// SendNoise sends n bytes at a pace; 0 bytes are without end.
func SendNoise(w io.Writer, n, bytesPerSecond int64) error {
	const piece = 16 << 10
	started := time.Now()
	for at := int64(0); n == 0 || at < n; {
		from := int(at % int64(len(Noise)))
		p := Noise[from:min(len(Noise), from+piece)]
		if n > 0 {
			p = p[:min(int64(len(p)), n-at)]
		}
		if _, err := w.Write(p); err != nil {
			return err
		}
		at += int64(len(p))
		due := started.Add(time.Duration(float64(at) / float64(bytesPerSecond) * float64(time.Second)))
		time.Sleep(time.Until(due))
	}
	return nil
}

// CheckNoise reads n bytes, or without end if that is 0, and compares each. arrived, if
// not nil, is told how many have arrived and were right.
func CheckNoise(r io.Reader, n int64, arrived func(n int64)) error {
	buf := make([]byte, 32<<10)
	r = Limited(r, n)
	for at := int64(0); n == 0 || at < n; {
		m, err := r.Read(buf)
		for got := buf[:m]; len(got) > 0; {
			want := Noise[at%int64(len(Noise)):]
			k := min(len(got), len(want))
			if !bytes.Equal(got[:k], want[:k]) {
				return ErrCorrupt
			}
			got, at = got[k:], at+int64(k)
		}
		if m > 0 && arrived != nil {
			arrived(at)
		}
		if err != nil && (n == 0 || at < n) {
			return err
		}
	}
	return nil
}

// Limited ends r after n bytes, unless that is 0.
func Limited(r io.Reader, n int64) io.Reader {
	if n == 0 {
		return r
	}
	return io.LimitReader(r, n)
}
