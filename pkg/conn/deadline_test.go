package conn

import (
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

func TestDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var d deadline
		first := d.wait()
		d.set(time.Now().Add(time.Minute))
		time.Sleep(time.Minute - 1)
		synctest.Wait()
		if tunnel.IsClosed(first) {
			t.Error("passed before its time")
		}
		d.set(time.Now().Add(time.Minute)) // moved at the last moment
		time.Sleep(time.Minute - 1)
		synctest.Wait()
		if tunnel.IsClosed(first) {
			t.Error("the old time counts after it was moved")
		}
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		if !tunnel.IsClosed(first) {
			t.Error("has not passed at its time")
		}
		d.set(time.Now().Add(-1))
		if !tunnel.IsClosed(d.wait()) {
			t.Error("one in the past has not passed")
		}
		d.set(time.Time{})
		if tunnel.IsClosed(d.wait()) {
			t.Error("has passed although there is none")
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if tunnel.IsClosed(d.wait()) {
			t.Error("a cancelled timer has fired")
		}
	})
}
